"""What a decoder is made of: plain data, read by `nn.decoder`, written by `models/*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation: root-mean-square, or with mean (`layer`) and optional bias."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0  # added to the stored weight: 1 in Gemma
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; `nn.rope` has the formulas."""

    theta: float
    rotary_dim: int
    interleaved: bool = False
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    original_max_position: int = 0  # llama3, yarn, longrope
    attention_factor: float | None = None  # yarn, longrope: scale of cos and sin
    sections: tuple[int, ...] = ()  # pairs that turn by time, row and column where they differ
    in_turns: bool = False  # of sections: one pair of each after another, not side by side
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    moving_dim: int = 0  # proportional: of rotary_dim, those whose angles aren't 0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """What keys and values, and perhaps queries, are compressed to (MLA)."""

    rank: int  # of keys and values together
    value_dim: int  # of each head
    query_rank: int = 0  # 0: queries aren't compressed
    norm_eps: float = 1e-6  # of the norms of what is compressed


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta rule in attention's place: a head has one state for all that it has seen."""

    value_dim: int  # of each head
    width: int  # inputs that the convolution before it sees
    norm_eps: float = 0.0  # of the norm of what heads give; 0: as of other norms
    strength: float = 1.0  # times the sigmoids that say how much is added

    def __post_init__(self) -> None:
        if self.value_dim % 16 or not 2 <= self.width <= 16:
            raise UnsupportedModelError(
                f"A gated delta rule with values of {self.value_dim} dimensions and a convolution "
                f"over {self.width} tokens isn't built; built are multiples of 16, and 2 to 16."
            )


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba 2 in attention's place: a head has one state for all that it has seen."""

    value_dim: int  # of each head
    width: int  # inputs that the convolution before it sees
    norm_eps: float
    conv_bias: bool = True
    normed: bool = True  # what heads give; else it is gated only
    own_steps: bool = False  # how far they go is of rows that have norm weights of their own
    out_scale: float = 1.0  # of what heads give

    def __post_init__(self) -> None:
        if self.value_dim % 16 or not 2 <= self.width <= 16:
            raise UnsupportedModelError(
                f"Mamba 2 with heads of {self.value_dim} dimensions and a convolution over "
                f"{self.width} tokens isn't built; built are multiples of 16, and 2 to 16."
            )


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """A short convolution between gates in attention's place: a sequence has its last inputs."""

    dim: int  # channels
    width: int  # inputs that it sees
    bias: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.width <= 16:
            raise UnsupportedModelError(
                f"A convolution over {self.width} tokens isn't built; built are 2 to 16."
            )


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer, or what stands in its place.

    With a latent, heads have keys of head_dim of which rope.rotary_dim are rotated, and the cache
    has one row for all of them. With a delta or mamba, num_heads are those of values, which
    num_kv_heads of queries and keys are shared by, and a sequence has a state in place of a cache;
    with a conv too, which has no heads. Without heads there is nothing (`NO_ATTENTION`).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None  # None: no rotation in this layer
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full", "turned"] = "none"  # over one head, or all heads
    # together; turned: over one head, by weights that multiply it after its rotation
    window: int = 0  # 0: sees everything before it
    sink_tokens: int = 0  # the first of a sequence, seen beside the window from any distance
    softcap: float = 0.0  # 0: none
    sinks: bool = False  # one learned logit a head
    causal: bool = True  # else a token sees those after it too
    latent: LatentSpec | None = None
    kv_rank: int = 0  # dimensions that keys and values are kept in; 0: head_dim
    gated: bool = False  # what heads saw is multiplied by the sigmoids of as many values
    delta: DeltaSpec | None = None
    mamba: MambaSpec | None = None
    conv: ConvSpec | None = None
    keys_are_values: bool = False  # both are one product, before their norms and the rotation
    value_norm: bool = False  # over one head, without weights
    reads: int | None = None  # the earlier layer whose keys and values it reads; None: its own

    @property
    def parts(self) -> int:
        """What is made for it: queries, and keys, and values (`ops.rotary_cache`)."""
        return 1 if self.reads is not None else 2 if self.keys_are_values else 3

    @property
    def is_absent(self) -> bool:
        """Whether the layer has a feed-forward block alone."""
        return not self.num_heads

    @property
    def remembers(self) -> DeltaSpec | MambaSpec | None:
        """How each head keeps one matrix of a sequence, if it does."""
        return self.delta or self.mamba

    @property
    def has_state(self) -> bool:
        """Whether a sequence has a state here, in place of keys and values of its tokens."""
        return self.remembers is not None or self.conv is not None

    @property
    def kept_dim(self) -> int:
        """Dimensions that a head's keys and values are kept in."""
        return self.kv_rank or self.head_dim

    @property
    def cached(self) -> tuple[int, int]:
        """Heads and dimensions that the cache has of a token."""
        if self.has_state or self.reads is not None:
            return 0, 0
        if self.latent is None:
            return self.num_kv_heads, self.kept_dim
        return 1, self.latent.rank + self.turning

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Of a sequence: its state (`ops.delta`), and the inputs before it; None: it has none."""
        if self.conv is not None:
            return (0, 1, 1, 16), (self.conv.width - 1, self.conv.dim)  # no head has one
        if self.remembers is None:
            return None
        dim, width = self.remembers.value_dim, self.remembers.width
        return (self.num_heads, dim // 16, self.head_dim, 16), (width - 1, sum(self.qkv_columns))

    @property
    def reach(self) -> int:
        """Tokens that one sees, itself among them; 0: all."""
        return self.window + self.sink_tokens

    @property
    def sink_reach(self) -> int:
        """The same where the first tokens are asked with queries of their own; else 0."""
        return self.reach if self.sink_tokens else 0

    @property
    def turning(self) -> int:
        """Dimensions of a head that are rotated."""
        return 0 if self.rope is None else self.rope.rotary_dim

    @property
    def qkv_columns(self) -> tuple[int, int, int]:
        """A token's queries, keys and values of all heads, where there is no latent; what makes the
        inputs of a convolution.
        """
        keys = self.num_kv_heads
        if self.conv is not None:
            return self.conv.dim, self.conv.dim, 0
        if self.remembers is not None:
            values = self.num_heads * self.remembers.value_dim
            return keys * self.head_dim, keys * self.head_dim, values
        made = (self.num_heads * self.head_dim, keys * self.head_dim, keys * self.kept_dim)
        queries, keys, values = (n if i < self.parts else 0 for i, n in enumerate(made))
        return queries, keys, values

    @property
    def asked_dim(self) -> int:
        """Values that a query and what the cache has of a key are multiplied by."""
        return self.latent.rank + self.turning if self.latent else self.kept_dim

    @property
    def seen_dim(self) -> int:
        """Values of what a head's scores weigh and add up: of latents, or of values."""
        if self.remembers is not None:
            return self.remembers.value_dim
        return self.latent.rank if self.latent else self.kept_dim

    @property
    def out_dim(self) -> int:
        """Values of all heads, that `out` multiplies."""
        if self.conv is not None:
            return self.conv.dim
        if self.remembers is not None:
            return self.num_heads * self.remembers.value_dim
        return self.num_heads * (self.latent.value_dim if self.latent else self.kept_dim)


NO_ATTENTION = AttentionSpec(0, 0, 0, 1.0, None)
"""Of a layer that mixes no tokens."""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """How a router chooses among feed-forward blocks."""

    count: int
    per_token: int
    normalize: bool  # the weights of those chosen sum to 1; else they are shares of all
    router_bias: bool = False
    sigmoid: bool = False  # shares are logits' sigmoids, not a softmax
    correction: bool = False  # each expert has a number that is added to shares for the choice
    groups: int = 1  # of experts
    top_groups: int = 1  # of those, how many can be chosen from
    scale: float = 1.0  # of the weights
    eps: float = 1e-20  # beside a sum of sigmoids that are made to sum to 1
    shared: int = 0  # intermediate of a block that all tokens go through beside them; 0: none
    shared_gate: bool = False  # each token takes so much of it as its sigmoid says
    latent: int = 0  # values that experts read and give, between two matrices of all; 0: hidden
    apart: bool = False  # router, experts and what is shared have norms of their own, of the stream
    weighed: bool = False  # each expert has a number that its weights are multiplied by


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward block: down(act(gate) · up), or down(act(up)) when not gated."""

    intermediate: int  # of each expert, where there are some; 0: there is no such block
    activation: Literal["silu", "gelu", "gelu_tanh", "swiglu_oai", "quick_gelu", "relu2"] = "silu"
    gated: bool = True
    bias: bool = False
    experts: ExpertsSpec | None = None  # blocks of this kind, of which tokens take a few
    row_operator: str = ""  # another package's (ops.foreign), in the activation's place; no gate

    def __post_init__(self) -> None:
        if self.row_operator and (self.gated or self.experts is not None):
            raise UnsupportedModelError(
                f"The row operator {self.row_operator} stands in the place of an activation, and "
                "of one with a gate, or of experts, none can: set gated=False, without experts."
            )


NO_MLP = MlpSpec(0, gated=False)
"""Of a layer that attends, or has states, and no more."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer. `pre_norm`: before each block; `post_norm`: after it, before the add; `scaled`:
    weights there instead (LayerScale).
    """

    attention: AttentionSpec
    mlp: MlpSpec
    pre_norm: bool = True
    post_norm: bool = False
    parallel: bool = False  # both blocks read the layer's input (GPT-NeoX)
    one_norm: bool = False  # of parallel blocks: both read the same normed rows (Command-R)
    scaled: bool = False  # only towers' layers are
    waits: bool = False  # what it gives is added once the next layer has read the same as it has
    input_dim: int = 0  # values of its own input, which it takes at last (`InputsSpec`); 0: none
    scalar: bool = False  # the stream behind it is multiplied by one learned number

    def __post_init__(self) -> None:
        if self.waits and self.mlp.intermediate:
            raise UnsupportedModelError(
                "A layer waits for the next one, but has a feed-forward block, which reads what "
                "it adds."
            )
        if self.parallel and not self.mlp.intermediate:
            raise UnsupportedModelError(
                "A layer's blocks are parallel, but it has no feed-forward block."
            )
        if self.attention.is_absent and (self.parallel or not self.mlp.intermediate):
            raise UnsupportedModelError(
                "A layer without attention has a feed-forward block, and none beside that."
            )


@dataclass(frozen=True, slots=True)
class ProjectorSpec:
    """From a tower's rows to those of a decoder: one matrix, or two with an activation between."""

    out: int  # the decoder's hidden size
    inner: int = 0  # between two matrices; 0: as `out`
    fold: int = 1  # so many rows and columns of patches become one row (pixel shuffle)
    pools: bool = False  # as their mean, not side by side
    merges: bool = False  # a matrix makes them as wide as one was
    bias: bool = False
    activation: Literal["none", "silu", "gelu", "gelu_tanh"] = "none"  # none: one matrix
    norm: NormSpec | None = None  # of what was folded

    def width(self, hidden: int) -> int:
        """Values of a row that was folded, and merged, of a tower's rows of `hidden`."""
        return hidden if self.pools or self.merges else hidden * self.fold**2


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """A vision transformer whose rows stand among a decoder's: `nn.vision`."""

    hidden: int
    layers: tuple[LayerSpec, ...]  # those that are computed
    norm: NormSpec
    image_size: int  # pixels of a side, that the table of positions is for
    patch: int  # pixels of a side
    projector: ProjectorSpec
    patch_bias: bool = True
    class_token: bool = False  # one more row comes before the patches'
    keeps_class: bool = False  # the decoder gets it too
    pre_norm: bool = False  # a norm before the first layer
    post_norm: bool = True  # one after the last
    ends_lines: bool = False  # one more row, of the decoder's width, ends lines of pictures
    by_fractions: bool = False  # patches find their positions by fractions of a side, as rounded

    @property
    def side(self) -> int:
        """Patches of a side of a tile."""
        return self.image_size // self.patch

    @property
    def rows(self) -> int:
        """Of a tile, in the tower."""
        return self.side**2 + self.class_token

    @property
    def tokens(self) -> int:
        """Of a tile, in the decoder."""
        return (self.side // self.projector.fold) ** 2 + self.keeps_class


@dataclass(frozen=True, slots=True)
class GridSpec:
    """A vision transformer of pictures of any size: `nn.grid`."""

    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    patch: int  # pixels of a side
    frames: int  # that a patch has; a picture is as many times the same
    theta: float  # of the rotation by rows and columns; 0: none
    projector: ProjectorSpec  # what it folds is one token of the decoder
    window: int = 0  # tokens of a side that see one another, in the layers that have windows
    whole: tuple[int, ...] = ()  # layers that have none, where others have
    patch_bias: bool = False
    table_side: int = 0  # of a learned table of positions, stretched over a picture; 0: none
    by_area: bool = False  # it is scaled as a picture is, and not from corner to corner
    in_turns: bool = False  # of all pairs' angles rows have every other one, columns those between
    pre_norm: bool = False  # a norm before the first layer
    last_norm: NormSpec | None = None  # after the last one; None: as the others
    deep: tuple[int, ...] = ()  # layers whose rows the decoder's first layers get as well

    def sees_all(self, layer: int) -> bool:
        """Whether a layer has no windows."""
        return not self.window or layer in self.whole


@dataclass(frozen=True, slots=True)
class InputsSpec:
    """What each layer has of a token beside the stream: values of a table, and of the embedding."""

    dim: int  # of each layer
    vocab_size: int  # rows of the table


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder: embedding, layers, final norm, head."""

    vocab_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    max_position: int
    tied: bool = False  # the head is the embedding
    head_bias: bool = False
    embed_scale: float = 1.0
    embed_scale_rounds: bool = True  # to the dtype that is computed in, as Gemma was trained
    learned_positions: int = 0  # rows of a learned position table, 0: none
    final_softcap: float = 0.0
    logit_scale: float = 1.0  # of the head's product, taken along by the norm before it
    reach: int = 0  # tokens that one sees at most, where that was chosen; 0: as layers say
    vision: VisionSpec | GridSpec | None = None  # what makes rows of pictures
    inputs: InputsSpec | None = None

    def __post_init__(self) -> None:
        for i, layer in enumerate(self.layers):
            self._check_reads(i, layer.attention)
        if self.layers and self.layers[-1].waits:
            raise UnsupportedModelError("The last layer waits for a next one, but there is none.")

    def _check_reads(self, i: int, a: AttentionSpec) -> None:
        """Raises UnsupportedModelError where a layer can't read the cache that it is to read."""
        if a.reads is None:
            return
        source = self.layers[a.reads].attention if 0 <= a.reads < i else None
        kept = None if source is None else source.cached
        if source is None or kept != (a.num_kv_heads, a.kept_dim) or source.latent is not None:
            raise UnsupportedModelError(
                f"Layer {i} reads {a.num_kv_heads} heads of {a.kept_dim} values of layer "
                f"{a.reads}, which isn't an earlier one with such keys and values."
            )

    @property
    def reads_beside(self) -> bool:
        """Whether any layer reads more than the stream: another's keys, or an input of its own."""
        others = any(layer.attention.reads is not None for layer in self.layers)
        return others or self.inputs is not None

    @property
    def depth(self) -> int:
        """How many layers there are, of which two that read the same are one."""
        return sum(not layer.waits for layer in self.layers)
