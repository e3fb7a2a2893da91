"""The batched sampler against a per-row version in plain Python that keeps its state on the host."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel.config import Settings
from kestrel.device import Staging
from kestrel.ops.philox import Gumbel
from kestrel.sampling import Sampler, SamplingParams
from kestrel.spi import Automaton, Decoding, Host, LogitRule, Static, TokenSet, TokenSpec
from kestrel.types import Token

V = 90  # some sets leave out few ids and some leave out many: both ways of banning
SPEC = TokenSpec(vocab_size=V, hidden_size=4, max_positions=64)
NOISE = Gumbel(V, torch.device("cpu"))


class NaiveRow:
    """One sequence, one token at a time, from the rules' documentation."""

    def __init__(self, given_settings, decoding, prompt, seed, choice):
        self.settings, self.decoding, self.prompt = given_settings, decoding, prompt
        self.seed, self.choice, self.output = seed, choice, []

    def processed(self, logits, host_allowed):
        s = self.settings
        values = [float(x) for x in logits]
        repetition = s.repetition_penalty or 1.0
        for i in set(self.prompt) | set(self.output):
            values[i] = values[i] / repetition if values[i] > 0 else values[i] * repetition
        for i in set(self.output):
            values[i] -= s.presence_penalty + s.frequency_penalty * self.output.count(i)
        for i, bias in s.logit_bias.items():
            values[i] += bias
        allowed = [i for i in range(V) if self._allows(i, host_allowed)]
        values = [x if i in allowed else -math.inf for i, x in enumerate(values)]
        for rule in self.decoding.rules:
            if isinstance(rule, LogitRule):
                values = prefer_group(values, rule)
        return values

    def _allows(self, i, host_allowed):
        at = len(self.output)
        stops = (set() if self.settings.ignore_eos else set(self.decoding.stop_ids)) | set(
            self.settings.stop_token_ids
        )
        if at < self.settings.min_tokens and i in stops:
            return False
        for rule in self.decoding.rules:
            if isinstance(rule, Static) and rule.first <= at and (rule.last is None or at < rule.last):
                if i not in rule.allowed:
                    return False
            elif isinstance(rule, Automaton) and i not in rule.mask[self._state(rule)]:
                return False
        return i in host_allowed

    def _state(self, automaton):
        state = automaton.start
        for token_id in self.output:
            classes = [k for k, members in enumerate(automaton.classes) if token_id in members]
            state = automaton.next[state][classes[0] if classes else len(automaton.classes)]
        return state

    def choose(self, values):
        s = self.settings
        best = max(values)
        if not s.temperature or self.decoding.greedy:
            return values.index(best)
        scaled = [(x - best) / s.temperature for x in values]
        order = sorted(range(V), key=lambda i: (-values[i], i))
        order = order[: s.top_k] if s.top_k else order
        total = sum(math.exp(scaled[i]) for i in order)
        kept, before = [], 0.0
        for i in order:
            if before > (1.0 if s.top_p is None else s.top_p) and (s.top_p or 1) < 1:
                break
            kept.append(i)
            before += math.exp(scaled[i]) / total
        kept = [i for i in kept if math.exp(scaled[i]) >= (s.min_p or 0.0) and scaled[i] > -math.inf]
        noise = NOISE(*(torch.tensor([part]) for part in (self.seed, len(self.output), self.choice)))[0]
        return max(sorted(kept), key=lambda i: scaled[i] + noise[i].item())


def prefer_group(values, rule):
    group, unless = rule.params["group"], rule.params.get("unless", TokenSet())
    inside = [x for i, x in enumerate(values) if i in group and i not in unless]
    outside = [i for i in range(V) if i not in group and i not in unless]
    mass = math.log(sum(math.exp(x) for x in inside)) if any(x > -math.inf for x in inside) else -math.inf
    if mass > max((values[i] for i in outside), default=-math.inf):
        return [-math.inf if i in outside else x for i, x in enumerate(values)]
    return values


ids = st.integers(0, V - 1)
id_lists = st.lists(ids, max_size=6)
token_sets = st.builds(
    lambda members, inverted: TokenSet(TokenSet.of(members).ranges, inverted), id_lists, st.booleans()
)
statics = st.builds(
    lambda allowed, first, length: Static(
        allowed=allowed, first=first, last=None if length is None else first + length
    ),
    token_sets,
    st.integers(0, 4),
    st.none() | st.integers(0, 4),
)


@st.composite
def automata(draw):
    classes = draw(st.lists(st.lists(ids, max_size=8).map(TokenSet.of), max_size=3))
    states = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, states - 1), min_size=len(classes) + 1, max_size=len(classes) + 1)
    return Automaton(
        classes=tuple(classes),
        next=tuple(draw(row) for _ in range(states)),
        mask=tuple(draw(token_sets) for _ in range(states)),
        start=draw(st.integers(0, states - 1)),
    )


logit_rules = st.builds(
    lambda group, unless: LogitRule(op="prefer_group", params={"group": group, "unless": unless}),
    token_sets,
    token_sets,
)
hosts = st.just(Host(start=lambda: None))


@st.composite
def rows(draw):
    min_tokens = draw(st.integers(0, 3))
    given_settings = Settings(
        temperature=draw(st.sampled_from([None, 0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([None, 0, 1, 5, V, V + 9])),
        top_p=draw(st.sampled_from([None, 1e-9, 0.4, 0.9, 1.0])),
        min_p=draw(st.sampled_from([None, 0.0, 0.05, 1.0])),
        min_tokens=min_tokens,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(ids, max_size=2))),
        repetition_penalty=draw(st.sampled_from([None, 1.0, 1.4, 0.8])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.5, -0.5])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([-100.0, -2.0, 3.0]), max_size=3)),
        logprobs=True,
    )
    rules = draw(st.lists(statics | automata() | logit_rules | hosts, max_size=4))
    decoding = Decoding(rules=tuple(rules), stop_ids=frozenset(draw(id_lists)), greedy=draw(st.booleans()))
    return given_settings, decoding, draw(id_lists), draw(st.integers(0, 2**63 - 1)), draw(st.integers(0, 3))


@settings(max_examples=50)
@given(
    st.lists(rows(), min_size=1, max_size=4),
    st.integers(0, 2**31),
    st.integers(0, 4),
    st.sampled_from(["host", "branch free", "apart"]),
)
def test_every_row_of_a_batch_is_sampled_as_by_the_naive_version(batch, noise_seed, preempt_at, place):
    generator = torch.Generator().manual_seed(noise_seed)
    staging = Staging(torch.device("cpu"))
    staging.is_shared = place != "apart"  # as on an accelerator, which sees what was sent
    sampler = Sampler(SPEC, 6, torch.device("cpu"), staging=staging, branch_free=place != "host")
    places = torch.randperm(6, generator=generator)[: len(batch)].tolist()
    naive = [NaiveRow(*row) for row in batch]
    params = [SamplingParams.resolve(row[0], row[1], SPEC) for row in batch]
    for place, row, resolved in zip(places, batch, params, strict=True):
        sampler.set_row(place, resolved, seed=row[3], choice=row[4], prompt_ids=row[2])
    for step in range(5):
        if step == preempt_at:  # row 0 loses its place and comes back by replay in another
            sampler.clear_row(places[0])
            places[0] = next(place for place in range(6) if place not in places)
            history = [Token(i) for i in naive[0].output]
            _, _, prompt, seed, choice = batch[0]
            sampler.set_row(
                places[0], params[0], seed=seed, choice=choice, prompt_ids=prompt, history=history
            )
        logits = torch.randn(len(batch), V, generator=generator) * 3
        host_allowed = [
            TokenSet.of(torch.randperm(V, generator=generator)[:18].tolist())
            if place in sampler.host_rows()
            else TokenSet.all()
            for place in places
        ]
        for place, allowed in zip(places, host_allowed, strict=True):
            if place in sampler.host_rows():
                sampler.set_host_mask(place, allowed)

        sampled = sampler.sample(logits, places, torch.tensor(places))

        assert sampled.logprob is not None
        for n, row in enumerate(naive):
            values = row.processed(logits[n].tolist(), host_allowed[n])
            is_empty = max(values) == -math.inf
            assert sampled.status[n].item() == (2 if is_empty else 0)
            got = int(sampled.ids[n])
            if not is_empty:
                assert got == row.choose(values)
                assert bool(sampled.stopped[n]) == (got in params[n].stop_ids)
                want = values[got] - math.log(sum(math.exp(x) for x in values))
                assert abs(sampled.logprob[n].item() - want) < 1e-4
            row.output.append(got)
