"""An engine over a checkpoint of this package, and settings that leave a transcription alone."""

PLAIN = {  # greedy, one attempt, nothing thought of the result
    "temperature": 0, "max_tokens": 40, "compression_ratio_threshold": None, "logprob_threshold": None,
    "no_speech_threshold": None,
}  # fmt: skip


def create(directory, **config):
    """An engine over ``directory`` with this package's plugin alone."""
    from kestrel.config import RuntimeConfig
    from kestrel.engine import InferenceEngine
    from kestrel.plugins import PluginHost
    from kestrel.skills import builtin_skills
    from kestrel_speech import plugin

    host = PluginHost.from_modules({"speech": plugin}, skills=builtin_skills())
    given = {"device": "cpu", "kv_cache_bytes": 2**24, "max_batch_size": 8, **config}
    return InferenceEngine.create(RuntimeConfig(model_path=directory, **given), plugins=host)
