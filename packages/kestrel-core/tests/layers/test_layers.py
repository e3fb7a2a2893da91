import pytest
import torch
import torch.nn.functional as F

from kestrel.layers import (
    MLP,
    AddNorm,
    Embedding,
    LayerNorm,
    Linear,
    LinearPair,
    LinearSum,
    Packed,
    RMSNorm,
    Rope,
    merge_media,
    pack_weights,
    packed_parts,
)
from kestrel.ops import resolve_ops
from kestrel.ops.linear_pair import linear_pair, linear_sum
from kestrel.ops.norm_linear import norm_linear
from kestrel.spi.backend import Available, Impl, KernelBackend, No, Yes
from kestrel.spi.batch import Batch, Limits

OPS = resolve_ops()


def filled(module, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def media_batch(features, media_rows):
    tokens = len(media_rows)
    none = torch.zeros(tokens, dtype=torch.int64)
    return Batch(
        ids_T=none,
        aux_TW=none.view(tokens, 1)[:, :0],
        media_rows_T=torch.tensor(media_rows),
        positions_PT=none.unsqueeze(0),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        states={},
        adapter_slots_B=torch.zeros(1, dtype=torch.int64),
        limits=Limits(max_rows=1, max_tokens=tokens, max_query_len=tokens, max_context_len=tokens),
        features_RC=features,
    )


def test_linear_has_the_names_and_shapes_of_a_checkpoint():
    layer = Linear(OPS, 6, 4)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (4, 6), "bias": (4,)}
    assert dict(Linear(OPS, 6, 4, bias=False).named_parameters()).keys() == {"weight"}
    x = torch.randn(3, 6)
    filled(layer)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))


def test_linear_adds_a_residual():
    layer = filled(Linear(OPS, 6, 4, epilogue="residual"))
    x, residual = torch.randn(3, 6), torch.randn(3, 4)
    assert torch.allclose(layer(x, residual), residual + F.linear(x, layer.weight, layer.bias))


def test_layers_can_be_built_without_memory():
    with torch.device("meta"):
        module = torch.nn.ModuleList([
            Packed(OPS, 8, {"q": 8, "k": 4}), LayerNorm(OPS, 8), RMSNorm(OPS, 8), AddNorm(OPS, 8), MLP(OPS, 8, 16),
            Embedding(10, 8), rope := Rope(OPS, 8),
        ])  # fmt: skip
    assert all(p.is_meta for p in module.parameters())
    assert rope(torch.arange(3).unsqueeze(0)).cos_TR.device.type == "cpu"


def test_layers_take_the_dtype_asked_for():
    layer = Linear(OPS, 6, 4, dtype=torch.bfloat16)
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert RMSNorm(OPS, 4, dtype=torch.bfloat16).weight.dtype == torch.bfloat16


def test_a_provider_is_chosen_per_number_of_rows():
    class Gemv(KernelBackend):
        name = "gemv"

        def probe(self, device):
            return Available()

        def impls(self):
            def supports(query):
                return Yes() if query.get("rows") == 1 else No("more than one row")

            return {"linear": Impl(supports=supports, fn=lambda x, w, b, e, r: torch.full((len(x), 4), 7.0))}

    layer = filled(Linear(resolve_ops(backends=[Gemv()]), 6, 4))
    assert torch.equal(layer(torch.randn(1, 6)), torch.full((1, 4), 7.0))
    x = torch.randn(2, 6)
    assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias))


class Transposing(KernelBackend):
    """Serves one-row products (or all) from a transposed weight."""

    name = "transposing"

    def __init__(self, all_rows):
        self._all_rows = all_rows

    def probe(self, device):
        return Available()

    def impls(self):
        def supports(query):
            return Yes() if self._all_rows or query.get("rows") == 1 else No("more than one row")

        def fn(x, weight, bias, epilogue, residual):
            return x @ weight + bias

        return {"linear": Impl(supports=supports, fn=fn, pack=lambda weight: weight.T.contiguous())}


@pytest.mark.parametrize("all_rows", [True, False])
def test_weights_are_laid_out_for_their_providers(all_rows):
    layer = filled(Linear(resolve_ops(backends=[Transposing(all_rows)]), 6, 4))
    weight = layer.weight.clone()
    pack_weights(torch.nn.ModuleList([layer]))
    assert tuple(layer.weight.shape) == ((6, 4) if all_rows else (4, 6))
    for x in (torch.randn(1, 6), torch.randn(3, 6)):
        assert torch.allclose(layer(x), F.linear(x, weight, layer.bias), atol=1e-6)


def test_packing_for_the_reference_keeps_the_weight_where_it_is():
    layer = filled(Linear(OPS, 6, 4))
    where = layer.weight.data_ptr()
    pack_weights(layer)
    assert layer.weight.data_ptr() == where


def test_packed_splits_its_output_and_says_where_parts_go():
    module = torch.nn.ModuleDict({"qkv": Packed(OPS, 8, {"q": 8, "k": 4, "v": 4})})
    q, k, v = module["qkv"].split(filled(module["qkv"])(torch.randn(2, 8)))
    assert (q.shape, k.shape, v.shape) == ((2, 8), (2, 4), (2, 4))
    parts = packed_parts(module)
    assert set(parts) == {f"qkv.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")}
    part = parts["qkv.k.bias"]
    assert (part.target, part.start, part.end) == ("qkv.bias", 8, 12)
    assert part.target in dict(module.named_parameters())


def test_gated_mlp_has_gate_and_up_rows():
    mlp = filled(MLP(OPS, 8, 6, activation="silu_mul", bias=False))
    x = torch.randn(3, 8)
    gate, up = (x @ mlp.fc1.weight.T).chunk(2, -1)
    assert mlp.fc1.weight.shape == (12, 8)
    assert torch.allclose(mlp(x), (F.silu(gate) * up) @ mlp.fc2.weight.T, atol=1e-5)


def test_mlp_adds_a_residual_when_built_so():
    mlp = filled(MLP(OPS, 8, 6, residual=True))
    plain = MLP(OPS, 8, 6)
    plain.load_state_dict(mlp.state_dict())
    x = torch.randn(3, 8)
    assert torch.allclose(mlp(x, x), x + plain(x), atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
def test_add_norm_is_the_sum_and_its_norm(kind):
    layer = filled(AddNorm(OPS, 8, kind=kind))
    alone = (
        LayerNorm(OPS, 8, layer.eps) if kind == "layer" else RMSNorm(OPS, 8, add_one=kind == "rms_plus_one")
    )
    alone.load_state_dict(layer.state_dict())
    x, delta = torch.randn(2, 3, 8).unbind(0)
    total, normed = layer(x, delta)
    assert torch.equal(total, x + delta)
    assert torch.allclose(normed, alone(x + delta), atol=1e-6)
    same, first = layer(x, None)
    assert same is x
    assert torch.allclose(first, alone(x), atol=1e-6)


def test_norm_without_weight_has_no_parameters():
    norm = RMSNorm(OPS, 8, weight=False)
    assert list(norm.parameters()) == []
    assert torch.allclose(norm(torch.full((1, 8), 3.0)), torch.ones(1, 8))


def test_rope_rotates_by_position_and_leaves_the_rest():
    layer = Rope(OPS, head_dim=8, rot_dim=4, base=100.0)
    x = torch.randn(3, 2, 8)
    y = layer.rotate(x, layer(torch.tensor([[0, 1, 5]])))
    assert torch.allclose(y[0], x[0])
    assert torch.equal(y[..., 4:], x[..., 4:])
    angle = torch.tensor(5 * 100.0 ** (-2 / 4))
    want = x[2, 0, 1] * angle.cos() - x[2, 0, 3] * angle.sin()
    assert torch.allclose(y[2, 0, 1], want, atol=1e-6)


def test_rope_scores_depend_on_distance_alone():
    layer = Rope(OPS, head_dim=16)
    q, k = torch.randn(2, 1, 1, 16).unbind(0)

    def score(at, to):
        return (
            layer.rotate(q, layer(torch.tensor([[at]]))) * layer.rotate(k, layer(torch.tensor([[to]])))
        ).sum()

    assert torch.allclose(score(3, 1), score(103, 101), atol=1e-4)


def test_rope_reads_the_position_row_of_each_frequency():
    layer = Rope(OPS, head_dim=4, rows=(0, 2))
    mixed = layer(torch.tensor([[3], [8], [5]]))
    plain = Rope(OPS, head_dim=4)
    first, second = plain(torch.tensor([[3]])), plain(torch.tensor([[5]]))
    assert torch.equal(mixed.cos_TR[0, 0], first.cos_TR[0, 0])
    assert torch.equal(mixed.cos_TR[0, 1], second.cos_TR[0, 1])


def test_media_features_replace_the_embeddings_of_their_tokens_alone():
    x, features = torch.randn(4, 3), torch.randn(2, 3)
    merged = merge_media(x, media_batch(features, [-1, 1, 0, -1]))
    assert torch.equal(merged, torch.stack((x[0], features[1], features[0], x[3])))


def test_without_media_the_embeddings_are_returned_as_they_are():
    x = torch.randn(2, 3)
    assert merge_media(x, media_batch(None, [-1, -1])) is x
    assert merge_media(x, media_batch(torch.zeros(0, 3), [-1, -1])) is x


def test_stale_nan_in_unused_features_does_not_reach_text():
    x = torch.randn(2, 3)
    merged = merge_media(x, media_batch(torch.full((1, 3), float("nan")), [-1, -1]))
    assert torch.equal(merged, x)


class Fusing(KernelBackend):
    """Serves norm and product of one row in one, and counts how often."""

    name = "fusing"

    def __init__(self):
        self.calls = 0

    def probe(self, device):
        return Available()

    def impls(self):
        def supports(query):
            return Yes() if query.get("rows") == 1 else No("more than one row")

        def fn(*args, **kwargs):
            self.calls += 1
            return norm_linear(*args, **kwargs)

        return {"norm_linear": Impl(supports=supports, fn=fn)}


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one", "layer"])
def test_a_deferred_norm_is_the_norm_whether_or_not_a_provider_fuses_it(kind):
    backend = Fusing()
    ops = resolve_ops(backends=[backend])
    norm = filled(LayerNorm(ops, 8) if kind == "layer" else RMSNorm(ops, 8, add_one=kind == "rms_plus_one"))
    layer = filled(Packed(ops, 8, {"a": 4, "b": 2}, norm=kind, epilogue="residual"), seed=1)
    for rows, calls in ((1, 1), (3, 1)):
        x, residual = torch.randn(rows, 8), torch.randn(rows, 6)
        want = residual + F.linear(norm(x), layer.weight, layer.bias)
        assert torch.allclose(layer(norm.defer(x), residual), want, atol=1e-5)
        assert backend.calls == calls


def test_a_deferred_norm_is_computed_once_for_all_who_take_its_value():
    norm = filled(RMSNorm(OPS, 8))
    deferred = norm.defer(torch.randn(2, 8))
    plain = filled(Linear(OPS, 8, 4))
    assert torch.equal(plain(deferred), plain(norm(deferred.x)))
    assert deferred.value() is deferred.value()


class Pairing(KernelBackend):
    """Has the pair and the sum of linears, of one row."""

    name = "pairing"

    def __init__(self):
        self.calls = []

    def probe(self, device):
        return Available()

    def impls(self):
        def impl(name, reference):
            def fn(*args):
                self.calls.append(name)
                return reference(*args)

            return Impl(supports=lambda query: Yes() if query.get("rows") == 1 else No("one row"), fn=fn)

        return {"linear_pair": impl("pair", linear_pair), "linear_sum": impl("sum", linear_sum)}


@pytest.mark.parametrize("rows", [1, 3])
def test_linears_side_by_side_are_the_same_in_one_op_and_one_by_one(rows):
    backend = Pairing()
    ops = resolve_ops(backends=[backend])
    norm = filled(AddNorm(ops, 8, kind="layer"))
    first, second = filled(Linear(ops, 8, 4), 1), filled(Linear(ops, 8, 6, epilogue="gelu_tanh"), 2)
    onto = filled(Linear(ops, 4, 8), 3)
    other = filled(Linear(ops, 6, 8, epilogue="accumulate", adds_bias=False), 4)
    x = torch.randn(rows, 8)
    pair, total = LinearPair(ops, first, second), LinearSum(ops, onto, other)
    assert pair.serves(rows) == total.serves(rows) == (rows == 1)
    assert not list(total.parameters())
    total.pack()
    y, inner = pair(x, norm)
    h = norm(x, None)[1]
    assert torch.allclose(y, F.linear(h, first.weight, first.bias), atol=1e-5)
    want = F.gelu(F.linear(h, second.weight, second.bias), approximate="tanh")
    assert torch.allclose(inner, want, atol=1e-5)
    added = F.linear(y, onto.weight, onto.bias) + F.linear(inner, other.weight, other.bias)
    assert torch.allclose(total.total(y, inner, x), x + added, atol=1e-4)
    assert torch.allclose(total(y, inner), added, atol=1e-4)
    assert backend.calls == (["pair", "sum"] if rows == 1 else [])
