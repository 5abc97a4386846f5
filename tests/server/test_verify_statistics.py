"""Sampled runs against the exact joint distribution: chi-square, and total variation at the noise floor.

A scripted target of 64 tokens whose p depends on the last token and, through penalties, on the whole run; drafters that
do what a client does: quantised draws for mss, the best of log q + noise for coupled, top-k for naive, and a
deterministic drafter among them. Every run is cut at three tokens, so the second and third come from inside a run, from
its bonus token, and from the next step alike. The slow tests take 10^6 tokens for each verifier.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.server.noise import Key, gumbel_on_device
from paceline.server.verify import (
    Proposal,
    RandomDice,
    multi_step,
    verify_coupled,
    verify_mss,
    verify_naive,
    walk,
)
from paceline.server.warp import Rows, warp
from paceline.shared.quantise import draw, quantised
from paceline.shared.sampling import SamplingParams
from paceline.shared.tree import TokenTree
from paceline.shared.warp import warp as warp_row

VOCAB_SIZE = 64
LENGTH = 3
START = 17
IDS = np.arange(VOCAB_SIZE)
SETTINGS = {
    "T0.3 top-p": SamplingParams(temperature=0.3, top_p=0.9),
    "T0.7 penalties": SamplingParams(temperature=0.7, presence_penalty=0.8, frequency_penalty=0.4),
    "T1.0": SamplingParams(temperature=1.0),
    "T1.3 top-p and penalties": SamplingParams(
        temperature=1.3, top_p=0.95, repetition_penalty=1.3, presence_penalty=0.5
    ),
}


class World:
    """Target and draft tables, p after every run (by the shipped warp), and the exact joint of three tokens."""

    def __init__(self, sampling, noise=1.2):
        rng = np.random.default_rng(64)
        self.sampling = sampling
        self.target = (rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * 2.0).astype(np.float32)
        self.draft = self.target + rng.normal(size=(VOCAB_SIZE, VOCAB_SIZE)) * noise
        self.drafts = {}
        second, third = np.divmod(np.arange(VOCAB_SIZE**2), VOCAB_SIZE)
        runs = (
            [()] + [(token,) for token in range(VOCAB_SIZE)] + list(zip(second.tolist(), third.tolist(), strict=True))
        )
        path_rows = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        tokens = np.array([token for run in runs for token in run], np.int64)
        rows = Rows(len(runs), sampling, path_rows, tokens, np.array([START], np.int32), np.zeros(0, np.int32))
        last = [run[-1] if run else START for run in runs]
        scores = warp(torch.from_numpy(self.target[last]), [rows])
        p = torch.softmax(scores.double(), -1).numpy()
        p /= p.sum(axis=1, keepdims=True)
        self.known = dict(zip(runs, p, strict=True))
        conditional = p[1 + VOCAB_SIZE :].reshape((VOCAB_SIZE,) * 3)
        self.joint = p[0][:, None, None] * p[1 : 1 + VOCAB_SIZE][:, :, None] * conditional

    def p(self, run):
        """float64[V]: the target's distribution after ``run``, of which no more than two tokens are told apart."""
        return self.known[run[:2]]

    def log_q(self, run):
        """float64[V]: the drafter's guess, with the user's parameters applied."""
        if run not in self.drafts:
            last = run[-1] if run else START
            self.drafts[run] = warp_row(IDS, self.draft[last], self.sampling, [START], run)
        return self.drafts[run]


def grow(run, depth, children_of):
    """A tree ``depth`` levels deep; ``children_of(run)`` gives tokens, drafters and a note for what is below a run."""
    tokens, parents, drafters, notes = [], [], [], {}
    level = [(-1, run)]
    for _ in range(depth):
        following = []
        for parent, path in level:
            drawn, who, note = children_of(path)
            notes[parent + 1] = note
            for token, drafter in zip(drawn, who, strict=True):
                following.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(parent)
                drafters.append(drafter)
        level = following
    return TokenTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(drafters, np.uint8)), notes


def rows_of(world, run, tree):
    paths = [run]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    return np.stack([world.p(path) for path in paths])


class Mss:
    """Draws of a quantised q and, after the first, one child of a deterministic drafter."""

    def __init__(self, world, rng, num_draws=2, decide=verify_mss, misreport=None):
        self.world, self.rng, self.num_draws, self.decide, self.misreport = world, rng, num_draws, decide, misreport
        self.proposals = {}

    def children(self, run):
        if run not in self.proposals:
            log_q = self.world.log_q(run)
            told = quantised(IDS, log_q, 12)
            drawn_from = quantised(IDS, log_q * 2.0, 12) if self.misreport == "temperature" else told
            self.proposals[run] = drawn_from, told
        drawn_from, told = self.proposals[run]
        tokens = draw(drawn_from, self.num_draws, self.rng).tolist()
        if self.misreport == "top-k":
            tokens = told.token_ids[np.argsort(-told.probs, kind="stable")[: self.num_draws]].tolist()
        guess = (run[-1] if run else START) * 7 % VOCAB_SIZE
        return [tokens[0], guess, *tokens[1:]], [0, 1, *[0] * len(tokens[1:])], {0: told}

    def step(self, run, _seed):
        tree, proposals = grow(run, min(2, LENGTH - len(run)), self.children)
        return tree, self.decide(tree, rows_of(self.world, run, tree), proposals, self.rng)


class Naive:
    """The two likeliest children."""

    def __init__(self, world, rng):
        self.world, self.rng = world, rng
        self.trees = {}

    def children(self, run):
        return np.argsort(-self.world.log_q(run), kind="stable")[:2].tolist(), [0, 0], None

    def step(self, run, _seed):
        if run not in self.trees:
            tree, _ = grow(run, min(2, LENGTH - len(run)), self.children)
            self.trees[run] = tree, rows_of(self.world, run, tree)
        tree, rows = self.trees[run]
        return tree, verify_naive(tree, rows, self.rng)


class Coupled(Naive):
    """The two best of log q plus the noise that the server will use."""

    NUM_SEEDS = 256

    def noise(self, seed):
        """float32[LENGTH, V]: the drafter's noise, made for many seeds at once (the verifier makes its own)."""
        first = seed - seed % self.NUM_SEEDS
        if first not in self.trees:
            keys = [Key(first + number, 0, 100 + depth) for number in range(self.NUM_SEEDS) for depth in range(LENGTH)]
            rows = gumbel_on_device(keys, VOCAB_SIZE, torch.device("cpu")).numpy()
            self.trees = {first: rows.reshape(self.NUM_SEEDS, LENGTH, VOCAB_SIZE)}
        return self.trees[first][seed - first]

    def step(self, run, seed):
        noise = self.noise(seed)

        def children(path):
            best = np.argsort(-(self.world.log_q(path) + noise[len(path)]), kind="stable")[:2].tolist()
            return best, [0, 0], None

        tree, _ = grow(run, min(2, LENGTH - len(run)), children)
        with np.errstate(divide="ignore"):
            logprobs = np.log(rows_of(self.world, run, tree))
        return tree, verify_coupled(tree, logprobs, seed=seed, position=100 + len(run))


def sample(drafter, num_runs, first_seed=0):
    """int64[V, V, V]: how often each run of three tokens came out."""
    counts = np.zeros((VOCAB_SIZE,) * 3, np.int64)
    for seed in range(first_seed, first_seed + num_runs):
        run = ()
        while len(run) < LENGTH:
            tree, verdict = drafter.step(run, seed)
            run = (*run, *(int(tree.tokens[node]) for node in verdict.nodes), verdict.bonus)
        counts[run[:LENGTH]] += 1
    return counts


def views(table):
    """First token; first and second; second and third; third."""
    return [table.sum(axis=(1, 2)), table.sum(axis=2).ravel(), table.sum(axis=0).ravel(), table.sum(axis=(0, 1))]


def p_values(counts, joint):
    """Chi-square of each view, cells with fewer than 8 expected pooled."""
    found = []
    for seen, share in zip(views(counts), views(joint), strict=True):
        expected = share / share.sum() * seen.sum()
        rare = expected < 8.0
        observed = np.append(seen[~rare], seen[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        if expected[-1] < 1e-9:
            assert observed[-1] == 0, "an impossible run came out"
            observed, expected = observed[:-1], expected[:-1]
        found.append(float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue))
    return found


def excess_variation(counts, joint):
    """Total variation of each view above what a perfect sampler shows on average, times the root of the sample size.

    Changing one of N samples moves it by at most 1/N, so by McDiarmid's inequality a perfect sampler exceeds 2 with a
    probability of at most exp(-8).
    """
    found = []
    for seen, share in zip(views(counts), views(joint), strict=True):
        floor = 0.5 * np.sqrt(2.0 * share * (1.0 - share) / (np.pi * seen.sum())).sum()
        found.append(float((0.5 * np.abs(seen / seen.sum() - share).sum() - floor) * np.sqrt(seen.sum())))
    return found


def check(drafter, num_runs):
    counts, joint = sample(drafter, num_runs), drafter.world.joint
    assert min(p_values(counts, joint)) > 1e-3
    assert max(excess_variation(counts, joint)) < 2.0


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [Naive, Coupled, Mss])
def test_runs_have_the_target_distribution(kind, setting):
    check(kind(World(SETTINGS[setting]), np.random.default_rng(1)), 800)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [Naive, Coupled, Mss])
def test_a_million_tokens_have_the_target_distribution(kind, setting):
    check(kind(World(SETTINGS[setting]), np.random.default_rng(2)), 84_000)


def stale_p(tree, probs, proposals, rng):
    """A planted fault: siblings are tested against p as it was before any rejection."""
    dice = RandomDice(rng)

    def choose(row, children):
        decision = None
        for node in children:
            one = TokenTree(tree.tokens[[node]], [-1], tree.drafters[[node]])
            decision = multi_step(one, lambda _row: probs[row], {0: proposals.get(row, {})}, dice)(0, [0])
            if decision.node is not None:
                return decision._replace(node=node)
        return decision or multi_step(tree, lambda _row: probs[row], proposals, dice)(row, [])

    return walk(tree, choose)


def full_q(tree, probs, proposals, rng):
    """A planted fault: the second draw is tested against the q of the first."""
    apart = TokenTree(tree.tokens, tree.parents, np.arange(len(tree), dtype=np.uint8))
    fresh = {
        row: {node: held[int(who)] for node, who in enumerate(tree.drafters) if int(who) in held}
        for row, held in proposals.items()
    }
    return verify_mss(apart, probs, fresh, rng)


FAULTS = [{"decide": stale_p}, {"decide": full_q}, {"misreport": "temperature"}, {"misreport": "top-k"}]


@pytest.mark.parametrize(
    "fault", [{}, *FAULTS], ids=["none", "stale p", "full q", "other temperature", "top-k as draws"]
)
def test_planted_faults_are_caught_by_the_same_test(fault):
    world = World(SETTINGS["T1.0"], noise=2.5)
    drafter = Mss(world, np.random.default_rng(3), num_draws=4, **fault)
    if not fault:
        check(drafter, 1_000)
        return
    assert min(p_values(sample(drafter, 1_000), world.joint)) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("draft", ["three likeliest", "least likely"])
def test_deterministic_drafts_do_not_move_a_four_way_choice(temperature, draft):
    """Logits (2, 1.5, 1, 0.5): at temperature 1 the first token must come 45 % of the time, whatever is proposed."""
    logits = np.array([2.0, 1.5, 1.0, 0.5]) / temperature
    p = np.exp(logits) / np.exp(logits).sum()
    tokens = [0, 1, 2] if draft == "three likeliest" else [3]
    tree = TokenTree(tokens, [-1] * len(tokens))
    probs = np.tile(p, (len(tree) + 1, 1))
    logprobs = np.log(probs)
    rng = np.random.default_rng(5)
    deciders = {
        "coupled": lambda seed: verify_coupled(tree, logprobs, seed=seed, position=9),
        "naive": lambda seed: verify_naive(tree, probs, rng),
        "mss": lambda seed: verify_mss(tree, probs, {}, rng),
    }
    for name, decide in deciders.items():
        counts = np.zeros(4)
        for seed in range(3_000):
            verdict = decide(seed)
            counts[tokens[verdict.nodes[0]] if verdict.nodes else verdict.bonus] += 1
        assert stats.chisquare(counts, p * counts.sum()).pvalue > 0.01, name


def test_proposals_in_the_form_of_the_contract_work_as_well():
    """Unsorted ids and probabilities that are not quantised, as a caller in Python may give them."""
    p = np.array([[0.1, 0.2, 0.3, 0.4]] * 3)
    q = Proposal(np.array([3, 0, 2]), np.array([0.5, 0.3, 0.2]))
    rng = np.random.default_rng(6)
    counts = np.zeros(4)
    for _ in range(4_000):
        first, second = rng.choice(q.token_ids, 2, replace=False, p=q.probs)
        tree = TokenTree([first, second], [-1, -1])
        verdict = verify_mss(tree, p, {0: {0: q}}, rng)
        counts[tree.tokens[verdict.nodes[0]] if verdict.nodes else verdict.bonus] += 1
    assert stats.chisquare(counts, p[0] * 4_000).pvalue > 0.01
