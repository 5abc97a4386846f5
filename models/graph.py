"""The ONNX graph of a draft model, built node by node with `onnx.helper`. Its interface is described in `export`.

Why by hand: a traced export copies the whole past at every level and knows nothing of trees. Here the past stays in the
caller's buffers, scores over past and new nodes are computed apart, and only the new keys and values come out. Llama,
Mistral, Qwen2 (biases on q, k, v) and Qwen3 (norms on q and k) share this graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from paceline.models.draft_weights import DraftWeights, Floats, LayerWeights
from paceline.models.quantise import quantise_blocks, quantise_rows

CONTRIB = "com.microsoft"
OPSET, CONTRIB_OPSET, IR_VERSION = 17, 1, 9
WIDTH_INPUT = "width"
"""An input that may be left out: it has a value of its own, the most candidates there are."""
EXTRA_OFFSET = -0.5
"""Added to logits of extra tokens: training pushed unlikely rows of the head down, of which the bridge shows a part."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """Names of the values that all layers share."""

    cos: str
    sin: str
    rope_ids: str
    by_kv_head: str
    by_query_head: str
    folded: str
    column_cut: str


@dataclass
class GraphBuilder:
    """Collects nodes and initializers; `bits` is 32 (float), 8 or 4 (weight-only, computed in int8)."""

    weights: DraftWeights
    bits: int = 8
    head_bits: int = 8
    block_size: int = 32
    nodes: list[Any] = field(default_factory=list)
    initializers: list[Any] = field(default_factory=list)
    _count: int = 0
    _constants: dict[str, str] = field(default_factory=dict)

    def build(self) -> onnx.ModelProto:
        w, s = self.weights, self.weights.shape
        hidden = self._embed("ids")
        flow = self._flow()
        new_kv = []
        pending: str | None = None
        for index, layer in enumerate(w.layers):
            normed, hidden = self._norm(hidden, pending, layer.input_norm)
            mixed, new_key, new_value = self._attention(index, layer, normed, flow)
            new_kv += [new_key, new_value]
            normed, hidden = self._norm(hidden, self._linear(mixed, layer.out, self.bits), layer.post_norm)
            pending = self._mlp(layer, normed)
        hidden = self._node("Add", [hidden, pending]) if pending else hidden
        rows = self._node("Gather", [self._node("Squeeze", [hidden, self._const(np.array([0]))]), "rows"], axis=0)
        normed, _ = self._norm(rows, None, w.final_norm)
        self._candidates(normed)
        stacked = self._node(
            "Concat", [self._node("Unsqueeze", [kv, self._const(np.array([0]))]) for kv in new_kv], axis=0
        )
        self._node(
            "Reshape", [stacked, self._const(np.array([s.num_layers, 2, s.num_kv_heads, -1, s.head_dim]))], "new_kv"
        )
        return self._model()

    def _node(self, op: str, inputs: list[str], output: str | None = None, domain: str = "", **attributes: Any) -> str:
        return self._nodes(op, inputs, [output or self._name(op)], domain, **attributes)[0]

    def _nodes(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> list[str]:
        self.nodes.append(helper.make_node(op, inputs, outputs, domain=domain, **attributes))
        return outputs

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem.lower()}_{self._count}"

    def _const(self, array: NDArray[Any]) -> str:
        name = self._name("const")
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def _embed(self, ids: str) -> str:
        """Rows of the embedding."""
        if self.bits == 32:
            return self._node("Gather", [self._shared("embedding", self.weights.embedding), ids], axis=0)
        if "embedding" not in self._constants:
            codes, scales = quantise_rows(self.weights.embedding)
            self._shared("embedding", codes)
            self._shared("embedding scales", scales[:, None])
        picked = self._node("Gather", [self._constants["embedding"], ids], axis=0)
        scale = self._node("Gather", [self._constants["embedding scales"], ids], axis=0)
        return self._node("Mul", [self._node("Cast", [picked], to=TensorProto.FLOAT), scale])

    def _flow(self) -> _Flow:
        """Values that every layer reads: rotary tables of the n positions and the shapes that depend on n and S."""
        s = self.weights.shape
        column = self._node(
            "Reshape", [self._node("Cast", ["positions"], to=TensorProto.FLOAT), self._const(np.array([-1, 1]))]
        )
        angles = self._node("Mul", [column, self._const(self.weights.inverse_frequencies[None].astype(np.float32))])
        cos, sin = self._node("Cos", [angles]), self._node("Sin", [angles])
        if self.weights.rope_scale != 1.0:
            scale = self._const(np.array(self.weights.rope_scale, np.float32))
            cos, sin = self._node("Mul", [cos, scale]), self._node("Mul", [sin, scale])
        zero, one = self._const(np.array([0])), self._const(np.array([1]))
        num_new = self._node("Slice", [self._node("Shape", ["positions"]), one, self._const(np.array([2]))])
        num_slots = self._node("Slice", [self._node("Shape", ["past_key_0"]), one, self._const(np.array([2]))])
        columns = self._node("Add", [num_slots, num_new])
        scalars = [self._node("Squeeze", [value, zero]) for value in (zero, num_new, one)]
        rope_ids = self._node("Unsqueeze", [self._node("Range", scalars), zero])
        return _Flow(
            cos=cos,
            sin=sin,
            rope_ids=rope_ids,
            by_kv_head=self._const(np.array([s.num_kv_heads, -1, s.head_dim])),
            by_query_head=self._node("Concat", [self._const(np.array([1, s.num_heads, -1])), columns], axis=0),
            folded=self._node("Concat", [self._const(np.array([s.num_kv_heads, -1])), columns], axis=0),
            column_cut=self._node("Concat", [num_slots, num_new], axis=0),
        )

    def _norm(self, hidden: str, added: str | None, weight: Floats) -> tuple[str, str]:
        """RMSNorm of hidden (+ added). Returns the normed value and the sum, which is the next residual."""
        eps = self.weights.shape.norm_eps
        if added is None:
            normed = self._node(
                "SimplifiedLayerNormalization", [hidden, self._const(weight)], axis=-1, epsilon=eps, stash_type=1
            )
            return normed, hidden
        outputs = [self._name("norm"), "", "", self._name("residual")]
        # The fused operator wants a batch axis in older runtimes, so the hidden state is [1, n, d] throughout.
        self._nodes(
            "SkipSimplifiedLayerNormalization", [hidden, added, self._const(weight)], outputs, CONTRIB, epsilon=eps
        )
        return outputs[0], outputs[3]

    def _linear(self, value: str, weight: Floats, bits: int, bias: Floats | None = None) -> str:
        """value @ weight.T (+ bias)."""
        outputs, inputs = weight.shape
        if bits == 32:
            product = self._node("MatMul", [value, self._const(weight.T)])
        elif bits == 8:
            product = self._int8_linear(value, weight)
        else:
            packed = quantise_blocks(weight, bits, self.block_size)
            names = [value, self._const(packed.packed), self._const(packed.scales.reshape(-1))]
            product = self._node(
                "MatMulNBits",
                names,
                domain=CONTRIB,
                K=inputs,
                N=outputs,
                bits=bits,
                block_size=self.block_size,
                accuracy_level=4,
            )
        return product if bias is None else self._node("Add", [product, self._const(bias)])

    def _int8_linear(self, value: str, weight: Floats) -> str:
        """Per-channel int8 weights times activations rounded to 8 bits, each row on its own scale.

        The runtime's fused dynamic operator has one scale for all rows, so one outlier row (the first token of a text)
        would spoil every other row of the call.
        """
        codes, scales = quantise_rows(weight)
        step = self._shared("step", np.array(1 / 127, np.float32))
        zero_point = self._shared("middle", np.array(128, np.uint8))
        # A row of zeros divides by zero, is rounded to anything, and is multiplied by zero again.
        peak = self._node("ReduceMax", [self._node("Abs", [value])], axes=[-1], keepdims=1)
        rounded = self._node("QuantizeLinear", [self._node("Div", [value, peak]), step, zero_point])
        names = [rounded, self._const(codes.T), step, self._const(scales), zero_point]
        return self._node("Mul", [self._node("MatMulIntegerToFloat", names, domain=CONTRIB), peak])

    def _shared(self, name: str, value: NDArray[Any]) -> str:
        """A constant that many nodes use, stored once."""
        if name not in self._constants:
            self._constants[name] = self._const(value)
        return self._constants[name]

    def _heads(self, value: str, num_heads: int, norm: Floats | None, rope: _Flow | None) -> str:
        """[1, n, heads * D] to [1, heads, n, D], normed per head and rotated where asked."""
        shape = self._const(np.array([1, -1, num_heads, self.weights.shape.head_dim]))
        split = self._node("Reshape", [value, shape])
        if norm is not None:
            split, _ = self._norm(split, None, norm)
        heads = self._node("Transpose", [split], perm=[0, 2, 1, 3])
        if rope is None:
            return heads
        names = [heads, rope.rope_ids, rope.cos, rope.sin]
        return self._node("RotaryEmbedding", names, domain=CONTRIB, interleaved=0)

    def _attention(self, index: int, layer: LayerWeights, normed: str, flow: _Flow) -> tuple[str, str, str]:
        """Grouped-query attention over the past buffer and the new nodes.

        Returns the mixed values [1, n, H*D] and the new key and value [Hkv, n, D].
        """
        s = self.weights.shape
        q_width, kv_width = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        qkv = self._linear(normed, layer.qkv, self.bits, layer.qkv_bias)
        parts = self._split(qkv, [q_width, kv_width, kv_width])
        query = self._heads(parts[0], s.num_heads, layer.q_norm, flow)
        key = self._node("Reshape", [self._heads(parts[1], s.num_kv_heads, layer.k_norm, flow), flow.by_kv_head])
        value = self._node("Reshape", [self._heads(parts[2], s.num_kv_heads, None, None), flow.by_kv_head])
        # The query heads that share a kv head are folded into its rows, so no key is repeated.
        folded = self._node("Reshape", [query, flow.by_kv_head])
        scale = float(s.head_dim) ** -0.5
        on_past = self._node("FusedMatMul", [folded, f"past_key_{index}"], domain=CONTRIB, transB=1, alpha=scale)
        on_new = self._node("FusedMatMul", [folded, key], domain=CONTRIB, transB=1, alpha=scale)
        scores = self._node("Reshape", [self._node("Concat", [on_past, on_new], axis=-1), flow.by_query_head])
        weights = self._node("Softmax", [self._node("Add", [scores, "mask"])], axis=-1)
        weights = self._node("Reshape", [weights, flow.folded])
        names = [self._name("split"), self._name("split")]
        past_weights, new_weights = self._nodes("Split", [weights, flow.column_cut], names, axis=-1)
        mixed_past = self._node("MatMul", [past_weights, f"past_value_{index}"])
        mixed = self._node("Add", [mixed_past, self._node("MatMul", [new_weights, value])])
        by_head = self._node("Reshape", [mixed, self._const(np.array([1, s.num_heads, -1, s.head_dim]))])
        by_row = self._node("Transpose", [by_head], perm=[0, 2, 1, 3])
        return self._node("Reshape", [by_row, self._const(np.array([1, -1, q_width]))]), key, value

    def _split(self, value: str, sizes: list[int]) -> list[str]:
        names = [self._name("split") for _ in sizes]
        return self._nodes("Split", [value, self._const(np.array(sizes))], names, axis=-1)

    def _mlp(self, layer: LayerWeights, normed: str) -> str:
        width = layer.down.shape[1]
        gate, up = self._split(self._linear(normed, layer.gate_up, self.bits), [width, width])
        swish = self._node("QuickGelu", [gate], domain=CONTRIB, alpha=1.0)  # x * sigmoid(x)
        return self._linear(self._node("Mul", [swish, up]), layer.down, self.bits)

    def _candidates(self, normed: str) -> None:
        """top_logprobs float32[m, K] over the draft's vocabulary, top_ids int32[m, K] in the target's numbering."""
        logits = self._linear(normed, self.weights.head, self.head_bits)
        logprobs = self._node("LogSoftmax", [logits], axis=-1)
        most = self._const(np.array([self.weights.shape.num_candidates]))
        self.initializers.append(numpy_helper.from_array(np.array([self.weights.shape.num_candidates]), WIDTH_INPUT))
        count = self._node("Min", [WIDTH_INPUT, most])
        rows = self._name("topk")
        self._nodes("TopK", [logprobs, count], ["top_logprobs", rows], axis=-1, largest=1, sorted=1)
        self._node("Gather", [self._const(self.weights.vocabulary.astype(np.int32)), rows], "top_ids", axis=0)
        if self.weights.bridge is not None:
            first = [self._const(np.array([value])) for value in (0, 1, 1)]
            columns = [self._node("Slice", [values, *first]) for values in (logprobs, logits)]
            self._extra(normed, self._node("Sub", columns), self.weights.bridge)

    def _extra(self, normed: str, shift: str, bridge: Floats) -> None:
        """extra_logprobs float32[m, x] of the tokens extra_ids. shift [m, 1]: minus log Z."""
        shift = self._node("Add", [shift, self._const(np.array([EXTRA_OFFSET], np.float32))])
        query = self._linear(normed, bridge, 32)
        # The target may have more (padded) ids than the draft's embedding has rows.
        known = self._node("Min", ["extra_ids", self._const(np.array([len(self.weights.embedding) - 1]))])
        logits = self._node("FusedMatMul", [query, self._embed(known)], domain=CONTRIB, transB=1)
        self._node("Add", [logits, shift], "extra_logprobs")

    def _model(self) -> onnx.ModelProto:
        s = self.weights.shape
        floats, longs = TensorProto.FLOAT, TensorProto.INT64
        inputs = [
            helper.make_tensor_value_info("ids", longs, [1, "n"]),
            helper.make_tensor_value_info("positions", longs, [1, "n"]),
            helper.make_tensor_value_info("mask", floats, [1, 1, "n", "slots_and_n"]),
            helper.make_tensor_value_info("rows", longs, ["m"]),
            helper.make_tensor_value_info(WIDTH_INPUT, longs, [1]),
        ]
        if self.weights.bridge is not None:
            inputs.append(helper.make_tensor_value_info("extra_ids", longs, ["x"]))
        for index in range(s.num_layers):
            past: list[str | int | None] = [s.num_kv_heads, "slots", s.head_dim]
            inputs.append(helper.make_tensor_value_info(f"past_key_{index}", floats, past))
            inputs.append(helper.make_tensor_value_info(f"past_value_{index}", floats, past))
        outputs = [
            helper.make_tensor_value_info("top_ids", TensorProto.INT32, ["m", "candidates"]),
            helper.make_tensor_value_info("top_logprobs", floats, ["m", "candidates"]),
            helper.make_tensor_value_info("new_kv", floats, [s.num_layers, 2, s.num_kv_heads, "n", s.head_dim]),
        ]
        if self.weights.bridge is not None:
            outputs.append(helper.make_tensor_value_info("extra_logprobs", floats, ["m", "x"]))
        graph = helper.make_graph(self.nodes, "paceline_draft", inputs, outputs, self.initializers)
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, CONTRIB_OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="paceline")
