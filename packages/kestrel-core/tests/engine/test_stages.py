"""What a load says about its stages."""

from kestrel.engine.stages import Stages


def test_stages_add_up_in_the_order_in_which_they_began():
    stages = Stages()
    for name in ("weights", "kernels", "weights"):
        with stages(name):
            pass
    assert list(stages.seconds) == ["weights", "kernels"]
    stages.seconds.update(weights=1.25, kernels=2.5)
    assert str(stages) == "3.8 s (weights 1.2, kernels 2.5)"


async def test_a_load_says_how_long_each_stage_took(toys, caplog):
    caplog.set_level("INFO", "kestrel.engine")
    async with toys.engine():
        pass
    (line,) = [record.getMessage() for record in caplog.records if "was made ready in" in record.getMessage()]
    for stage in ("weights", "kernels", "largest launches", "pools", "first launches", "capture of prefill"):
        assert stage in line
