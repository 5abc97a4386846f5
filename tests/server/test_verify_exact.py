"""Exactness without sampling: every draw of the drafters and every throw of the dice is enumerated.

Small vocabularies, random p and q that depend on the whole path, random tree shapes, one to three drafters, point
masses. What a step emits, continued by sampling from p, must have the target's joint distribution to 1e-9.
"""

import itertools
from collections import defaultdict

import numpy as np
import pytest

from paceline.server.verify import Proposal, match, multi_step, verify_greedy, walk
from paceline.shared.tree import TokenTree

TOLERANCE = 1e-9


class EnumeratedDice:
    """Follows a script of branches; beyond it takes the first branch and notes the others for later."""

    def __init__(self, script):
        self.script = list(script)
        self.taken = []
        self.others = []
        self.weight = 1.0

    def branch(self, probabilities):
        place = len(self.taken)
        options = [index for index, probability in enumerate(probabilities) if probability > 0.0]
        if place < len(self.script):
            index = self.script[place]
        else:
            index = options[0]
            self.others += [[*self.taken, option] for option in options[1:]]
        self.taken.append(index)
        self.weight *= probabilities[index]
        return index

    def accepts(self, probability):
        return self.branch([probability, 1.0 - probability]) == 0

    def draws(self, weights):
        return self.branch((weights / weights.sum()).tolist())


def outcomes(run):
    """Every (weight, result) of ``run(dice)``."""
    scripts = [[]]
    while scripts:
        dice = EnumeratedDice(scripts.pop())
        result = run(dice)
        scripts += dice.others
        yield dice.weight, result


class Conditional:
    """A random distribution over tokens for every path of tokens, some of it exactly zero."""

    def __init__(self, rng, vocab_size, sparsity=0.2, sharpness=2.0):
        self.rng, self.vocab_size, self.sparsity, self.sharpness = rng, vocab_size, sparsity, sharpness
        self.known = {}

    def __call__(self, path):
        if path not in self.known:
            weights = np.exp(self.rng.normal(size=self.vocab_size) * self.sharpness)
            weights *= self.rng.random(self.vocab_size) >= self.sparsity
            weights = weights if weights.any() else np.ones(self.vocab_size)
            self.known[path] = weights / weights.sum()
        return self.known[path]


class PointMass:
    """A drafter that proposes deterministically: its j-th child below a path is a fixed token."""

    def __init__(self, rng, vocab_size):
        self.rng, self.vocab_size, self.known = rng, vocab_size, {}

    def __call__(self, path):
        if path not in self.known:
            self.known[path] = self.rng.permutation(self.vocab_size)
        return self.known[path]


def random_shape(rng, num_nodes, num_drafters):
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(num_nodes)]
    return parents, rng.integers(0, num_drafters, num_nodes).tolist()


def drawn_trees(parents, drafters, models):
    """Every (probability, tree, proposals) that drafters with these q may send in this shape.

    A node whose drafter has nothing left to draw is left out with all below it: that depends on q alone.
    """

    def grow(node, index, tokens, kept_parents, kept_drafters, weight):
        if node == len(parents):
            yield weight, tokens, kept_parents, kept_drafters
            return
        parent, drafter = parents[node], drafters[node]
        rest = (node + 1, index, tokens, kept_parents, kept_drafters)
        if parent >= 0 and index.get(parent) is None:
            yield from grow(*rest, weight)
            return
        under = -1 if parent < 0 else index[parent]
        path = path_of(under, tokens, kept_parents)
        model = models[drafter]
        siblings = zip(kept_parents, kept_drafters, tokens, strict=True)
        mine = [token for up, who, token in siblings if up == under and who == drafter]
        if isinstance(model, PointMass):
            options = [(int(model(path)[len(mine)]), 1.0)] if len(mine) < model.vocab_size else []
        else:
            q = model(path).copy()
            q[mine] = 0.0
            options = [(token, q[token] / q.sum()) for token in np.flatnonzero(q).tolist()] if q.any() else []
        if not options:
            yield from grow(*rest, weight)
        for token, probability in options:
            more = {**index, node: len(tokens)}
            yield from grow(
                node + 1,
                more,
                [*tokens, token],
                [*kept_parents, under],
                [*kept_drafters, drafter],
                weight * probability,
            )

    for weight, tokens, up, who in grow(0, {}, [], [], [], 1.0):
        tree = TokenTree(np.array(tokens, np.int32), np.array(up, np.int32), np.array(who, np.uint8))
        yield weight, tree


def path_of(node, tokens, parents):
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(reversed(path))


def tree_path(tree, row):
    return path_of(row - 1, tree.tokens.tolist(), tree.parents.tolist())


def joint(p, length):
    """Probability of every sequence of ``length`` tokens under p."""
    table = {}
    for sequence in itertools.product(range(p.vocab_size), repeat=length):
        table[sequence] = float(np.prod([p(sequence[:place])[sequence[place]] for place in range(length)]))
    return table


def continued(emitted, weight, p, length, table):
    """Add ``weight`` to every sequence that begins with what was emitted, in proportion to p."""
    for tail in itertools.product(range(p.vocab_size), repeat=length - len(emitted)):
        sequence = (*emitted, *tail)
        share = weight
        for place in range(len(emitted), length):
            share *= p(sequence[:place])[sequence[place]]
        table[sequence] += share


def emitted_tokens(tree, verdict):
    return (*(int(tree.tokens[node]) for node in verdict.nodes), verdict.bonus)


def largest_error(p, weighted, length):
    """The largest deviation from the target's joint, given (weight, emitted tokens) pairs."""
    by_run = defaultdict(float)
    for weight, emitted in weighted:
        by_run[emitted] += weight
    table = defaultdict(float)
    for emitted, weight in by_run.items():
        continued(emitted, weight, p, length, table)
    return max(abs(table[sequence] - probability) for sequence, probability in joint(p, length).items())


def mss_runs(p, parents, drafters, models, chooser=multi_step):
    """(weight, emitted tokens) for every tree and every throw, decided by the shipped chooser."""
    for tree_weight, tree in drawn_trees(parents, drafters, models):
        proposals = {}
        for parent in range(len(tree) + 1):
            path = tree_path(tree, parent)
            sampled = {who: model for who, model in enumerate(models) if not isinstance(model, PointMass)}
            proposals[parent] = {who: sparse(model(path)) for who, model in sampled.items()}

        def run(dice, tree=tree, proposals=proposals):
            def rows(row):
                return p(tree_path(tree, row))

            return walk(tree, chooser(tree, rows, proposals, dice))

        for weight, verdict in outcomes(run):
            yield tree_weight * weight, emitted_tokens(tree, verdict)


def sparse(q):
    ids = np.flatnonzero(q)
    return Proposal(ids.astype(np.int32), q[ids])


def mss_error(seed, vocab_size, num_nodes, kinds, chooser=multi_step):
    rng = np.random.default_rng(seed)
    p = Conditional(rng, vocab_size)
    models = [Conditional(rng, vocab_size) if kind == "q" else PointMass(rng, vocab_size) for kind in kinds]
    parents, drafters = random_shape(rng, num_nodes, len(kinds))
    depth = int(TokenTree(np.zeros(num_nodes, np.int32), np.array(parents, np.int32)).depths.max())
    return largest_error(p, mss_runs(p, parents, drafters, models, chooser), depth + 1)


@pytest.mark.parametrize("kinds", ["q", "qq", "d", "qd", "qqd"])
@pytest.mark.parametrize(
    ("vocab_size", "num_nodes", "seed"),
    [(2, 5, 0), (3, 4, 1), (3, 5, 2), (4, 3, 3), (4, 4, 4), (6, 3, 5), (4, 5, 6), (5, 4, 7)],
)
def test_mss_emits_exactly_the_target_distribution(kinds, vocab_size, num_nodes, seed):
    assert mss_error(seed, vocab_size, num_nodes, kinds) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("kinds", ["q", "qq", "qd"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("vocab_size", "num_nodes"), [(4, 5), (5, 4), (6, 4)])
def test_mss_emits_exactly_the_target_distribution_on_larger_trees(kinds, vocab_size, num_nodes, seed):
    assert mss_error(seed, vocab_size, num_nodes, kinds) < TOLERANCE


def test_mss_is_exact_when_q_equals_p_and_when_supports_are_disjoint():
    rng = np.random.default_rng(8)
    p = Conditional(rng, 4)
    assert largest_error(p, mss_runs(p, [-1, -1, 0], [0, 0, 0], [p]), 3) < TOLERANCE
    low, high = Conditional(rng, 4), Conditional(rng, 4)
    for path in [(), *itertools.product(range(4), repeat=1), *itertools.product(range(4), repeat=2)]:
        low.known[path] = np.array([0.3, 0.7, 0.0, 0.0])
        high.known[path] = np.array([0.0, 0.0, 0.6, 0.4])
    assert largest_error(low, mss_runs(low, [-1, -1, 0], [0, 0, 0], [high]), 3) < TOLERANCE


def stale_p(tree, probs, proposals, dice):
    """A planted fault: siblings are tested against p as it was before any rejection."""

    def choose(row, children):
        for node in children:
            one = TokenTree(tree.tokens[[node]], [-1], tree.drafters[[node]])
            decision = multi_step(one, lambda _row, row=row: probs(row), {0: proposals.get(row, {})}, dice)(0, [0])
            if decision.node is not None:
                return decision._replace(node=node)
        return decision if children else multi_step(tree, probs, proposals, dice)(row, [])

    return choose


def unrestricted_q(tree, probs, proposals, dice):
    """A planted fault: every sibling is tested against the full q, although it was drawn without replacement."""
    relabelled = TokenTree(tree.tokens, tree.parents, np.arange(len(tree), dtype=np.uint8))
    fresh = {
        row: {
            node: by_drafter[int(tree.drafters[node])] for node in range(len(tree)) if tree.drafters[node] in by_drafter
        }
        for row, by_drafter in proposals.items()
    }
    return multi_step(relabelled, probs, fresh, dice)


@pytest.mark.parametrize("fault", [stale_p, unrestricted_q])
def test_planted_faults_are_seen_by_the_enumeration(fault):
    rng = np.random.default_rng(11)
    p, q = Conditional(rng, 4, sparsity=0.0), Conditional(rng, 4, sparsity=0.0)
    assert largest_error(p, mss_runs(p, [-1, -1, 0], [0, 0, 0], [q]), 3) < TOLERANCE
    assert largest_error(p, mss_runs(p, [-1, -1, 0], [0, 0, 0], [q], fault), 3) > 1e-3


def test_a_child_left_out_because_of_its_token_is_seen_by_the_enumeration():
    rng = np.random.default_rng(12)
    p, q = Conditional(rng, 3, sparsity=0.0), Conditional(rng, 3, sparsity=0.0)

    runs = []
    for weight, tree in drawn_trees([-1, -1], [0, 0], [q]):
        cut = tree.take([node for node in range(2) if tree.tokens[node] != 0])
        for share, verdict in outcomes(
            lambda dice, t=cut: walk(
                t, multi_step(t, lambda row, t=t: p(tree_path(t, row)), {0: {0: sparse(q(()))}}, dice)
            )
        ):
            runs.append((weight * share, emitted_tokens(cut, verdict)))
    assert largest_error(p, runs, 2) > 1e-3


@pytest.mark.parametrize(("vocab_size", "num_nodes", "seed"), [(2, 5, 0), (3, 5, 1), (4, 5, 2), (5, 4, 3), (6, 3, 4)])
def test_naive_emits_exactly_the_target_distribution(vocab_size, num_nodes, seed):
    rng = np.random.default_rng(seed)
    p = Conditional(rng, vocab_size)
    parents, _ = random_shape(rng, num_nodes, 1)
    tree = TokenTree(rng.integers(0, vocab_size, num_nodes), np.array(parents, np.int32))  # duplicates too

    def run(dice):
        return walk(tree, match(tree, lambda row: dice.draws(p(tree_path(tree, row)))))

    runs = [(weight, emitted_tokens(tree, verdict)) for weight, verdict in outcomes(run)]
    assert largest_error(p, runs, int(tree.depths.max()) + 1) < TOLERANCE


@pytest.mark.parametrize(("vocab_size", "num_nodes", "seed"), [(2, 5, 0), (3, 5, 1), (4, 4, 2), (6, 3, 3)])
def test_matching_independent_choices_emits_exactly_their_distribution(vocab_size, num_nodes, seed):
    """Coupled (and greedy, with a point mass for p): rows are chosen from p whatever the tree is, then matched."""
    rng = np.random.default_rng(seed)
    parents, _ = random_shape(rng, num_nodes, 1)
    tree = TokenTree(rng.integers(0, vocab_size, num_nodes), np.array(parents, np.int32))
    for sharpness in (1.0, 100.0):
        p = Conditional(rng, vocab_size, sharpness=sharpness)
        rows = np.stack([p(tree_path(tree, row)) for row in range(num_nodes + 1)])
        runs = []
        for choices in itertools.product(range(vocab_size), repeat=num_nodes + 1):
            weight = float(np.prod(rows[np.arange(num_nodes + 1), choices]))
            if weight > 0.0:
                runs.append((weight, emitted_tokens(tree, verify_greedy(tree, choices))))
        assert largest_error(p, runs, int(tree.depths.max()) + 1) < TOLERANCE
