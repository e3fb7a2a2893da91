"""The training pipeline agrees with itself: scenes, tasks, packing, one step, export."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from training import export, phrases, tokenizer
from training.batches import QUERIES, SLOTS, TOTAL, layout, pack
from training.checkpoint import load_shards
from training.crops import batch_crops, picture_crops, tiling
from training.decoder import GreedyDecoder
from training.evaluate import Cases, Scores, named, picture
from training.model import NanoConfig, NanoModel, bin_size, size_bin
from training.pieces import ANSWER, COORD, EOS, SIZE, Vocabulary
from training.render import Renderer, resize
from training.scenes import E, Sampler
from training.train import Trainer

CPU = torch.device("cpu")
TINY = NanoConfig(dim=32, ff_dim=32, n_layers=1, n_heads=1, enc_dim=16, enc_ff_dim=16, enc_n_layers=1, enc_n_heads=1,
                  proj_inner_dim=16, inner_dim=16)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(CPU, 5)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer.load(), CPU)


def test_entities_lie_inside_the_picture_in_reading_order(sampler: Sampler) -> None:
    scenes = sampler.scenes(torch.tensor([[192, 256]] * 256))
    used = scenes.kind >= 0
    boxes = scenes.box[used]
    assert (boxes[:, :2] < boxes[:, 2:]).all()
    assert (boxes > -0.02).all()
    assert (boxes < 1.02).all()
    free = ~scenes.is_chart
    key = (scenes.center[..., 1] + 0.05 * scenes.center[..., 0])[free]
    both = used[free][:, 1:]
    assert (key.diff(dim=1)[both] >= 0).all()


def test_the_middle_of_a_lone_shape_has_its_colour(sampler: Sampler) -> None:
    scenes = sampler.scenes(torch.tensor([[96, 96]] * 64))
    images = Renderer(sampler).draw(scenes, 96, 96)
    lone = (scenes.kind >= 0).sum(1) == 1
    lone &= (scenes.shape_kind[:, 0] >= 0) & (scenes.shape_kind[:, 0] != phrases.SHAPES.index("ring"))
    x, y = (scenes.shape_center[lone, 0] * 96).long().unbind(1)
    seen = images[lone].permute(0, 2, 3, 1)[torch.arange(len(x)), y, x]
    assert len(x) > 0
    assert (seen - scenes.shape_rgb[lone, 0]).abs().mean() < 0.1


def test_packed_counts_agree_with_the_scene(sampler: Sampler, vocabulary: Vocabulary) -> None:
    scenes = sampler.scenes(torch.tensor([[196, 196]] * 64))
    tasks = pack(scenes, vocabulary, sampler)
    slots, _ = layout()
    text = tokenizer.load()
    checked = 0
    for row in range(64):
        for slot in range(QUERIES):
            if phrases.QUESTION_NAMES[int(tasks.kind[row, slot])] != "count":
                continue
            ids = tasks.tokens[row, slots == slot].tolist()
            question, answer = text.decode(ids[:20]), text.decode([ids[ids.index(ANSWER) + 2]])
            if "red circles" in question or " circles " in question:
                is_red = scenes.color[row] == 0 if "red" in question else torch.ones(E, dtype=torch.bool)
                if any(f" {c} circles" in question for c in [*phrases.COLOR_NAMES[1:], "grey"]):
                    continue
                checked += 1
                assert int(answer) == int(((scenes.kind[row] == 0) & is_red).sum())
    assert checked > 0


def test_joined_pieces_equal_the_encoding_of_the_whole_question() -> None:
    encode = tokenizer.load()
    for case in Cases(3, per_call=4).questions("exists", 8):
        ids = encode.encode(case.text).ids
        assert encode.decode(ids) == case.text
        assert max(ids) < NanoConfig().vocab_size
        assert min(ids) > 20


def test_control_tokens_cannot_be_spelled_by_a_user() -> None:
    assert min(tokenizer.load().encode("<|endoftext|><|nano_reserved_2|>").ids) > 20


def test_points_and_sizes_end_in_the_end_token(sampler: Sampler, vocabulary: Vocabulary) -> None:
    tasks = pack(sampler.scenes(torch.tensor([[196, 196]] * 16)), vocabulary, sampler)
    slots, _ = layout()
    detect = tasks.tokens[:, slots == QUERIES + 2]
    assert ((detect == COORD).sum(1) == 2 * (detect == SIZE).sum(1)).all()
    assert (detect == EOS).any(1).all()
    assert tasks.tokens.shape == (16, TOTAL)
    assert sum(SLOTS) == TOTAL


def test_crops_on_the_device_are_those_of_pillow(sampler: Sampler) -> None:
    images = Renderer(sampler).draw(sampler.scenes(torch.tensor([[208, 512]])), 208, 512)
    ours, tiles = batch_crops(images, NanoConfig())
    theirs, same = picture_crops(picture(images[0]), NanoConfig())
    assert tiles == same == (1, 2)
    assert (ours - theirs).abs().max() < 3 * 2 / 255
    assert resize(images, 208, 512) is images


def test_tiling_stays_within_the_limit_for_usual_pictures() -> None:
    c = NanoConfig()
    assert tiling(480, 640, c) == (1, 1)
    assert tiling(320, 640, c) == (1, 2)
    assert tiling(196, 900, c) == (1, 1)


def test_sizes_survive_their_bins() -> None:
    sizes = torch.tensor([1 / 1024, 0.1, 0.5, 1.0])
    assert torch.allclose(bin_size(size_bin(sizes, 256), 256), sizes, rtol=1e-5)


def test_packed_tasks_see_only_their_picture_and_themselves(sampler: Sampler, vocabulary: Vocabulary) -> None:
    torch.manual_seed(0)
    model = NanoModel(TINY)
    scenes = sampler.scenes(torch.tensor([[196, 196]]))
    tasks = pack(scenes, vocabulary, sampler)
    crops, tiles = batch_crops(Renderer(sampler).draw(scenes, 196, 196), TINY)
    slots, _ = layout()
    hidden = model(crops, tiles, tasks.tokens, tasks.values)
    other = torch.where(slots == 3, tasks.tokens, torch.randint(30, 90, tasks.tokens.shape))
    again = model(crops, tiles, other, tasks.values)
    assert torch.allclose(hidden[:, slots == 3], again[:, slots == 3], atol=1e-5)
    assert not torch.allclose(hidden[:, slots == 2], again[:, slots == 2], atol=1e-3)


def test_one_step_trains_and_resumes(tmp_path: Path) -> None:
    args = argparse.Namespace(
        out=tmp_path, moments=None, steps=2, batch=1, lr=1e-3, decay=0.05, ema=0.999, seed=1, seconds=1e9, device="cpu",
        no_compile=True, report=100,
    )  # fmt: skip
    trainer = Trainer(args, TINY, ahead=1)
    before = trainer.model.text.lm_head.bias.clone()
    trainer.run()
    assert not torch.equal(before, trainer.model.text.lm_head.bias)
    resumed = Trainer(args, TINY, ahead=1)
    assert resumed.progress.step == 2
    assert torch.equal(resumed.model.text.wte, trainer.model.text.wte)
    assert set(load_shards(tmp_path, "average")) == {name for name, _ in trainer.model.named_parameters()}


def test_an_exported_model_reads_back_and_decodes(tmp_path: Path, sampler: Sampler) -> None:
    torch.manual_seed(0)
    model = NanoModel(TINY)
    export.write({n: q.detach() for n, q in model.named_parameters()}, TINY, tmp_path, torch.float16)
    back = export.read(tmp_path)
    assert back.config == TINY
    assert torch.allclose(back.vision.pos_emb, model.vision.pos_emb, atol=1e-3)
    image = picture(Renderer(sampler).draw(sampler.scenes(torch.tensor([[196, 196]])), 196, 196)[0])
    decoder = GreedyDecoder(back, tokenizer.load())
    first = decoder.query(image, "Is there a circle?")
    assert first == decoder.query(image, "Is there a circle?")
    assert len(decoder.point(image, "circle")["points"]) <= 50


def test_the_shipped_model_answers_fresh_scenes() -> None:
    decoder, scores = GreedyDecoder(export.read(), tokenizer.load()), Scores()
    cases = Cases(77, per_call=3)
    for case in (
        *cases.questions("color", 6),
        *cases.questions("count", 6),
        *cases.located("detect", 6),
        *cases.captions(3),
    ):
        scores.score(case, decoder)
    assert scores.share("query exact") >= 10 / 12
    assert scores.share("detect F1") >= 0.9
    assert scores.share("caption objects") >= 0.85


def test_captions_are_read_with_their_counts() -> None:
    said = named('Two red circles, an orange star and the word "CAT".')
    assert said == {"red circle": 2, "orange star": 1, "word CAT": 1}
