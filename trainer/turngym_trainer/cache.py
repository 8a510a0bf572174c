"""Keys and values of what a model has read: while a turn is sampled, and from turn to turn.

A token costs 2 · layers · key-value heads · head size numbers: 4 KiB in float32 for `tiny`, 45 KiB for `smollm2`. They
lie in one rectangle for all rows, whose width is the longest kept context, the most new tokens of a prompt and the most
tokens of an answer, so at most about twice the longest context. Knows nothing of sampling or environments.
"""

import inspect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


def new_cache(model: PreTrainedModel, room: int) -> Cache:
    """An empty cache for sequences of at most `room` tokens; one that grows by itself where the model is not plain."""
    return RoomyCache([_Layer(room) for _ in _layers(model)]) if is_plain(model) else DynamicCache(config=model.config)


def is_plain(model: PreTrainedModel) -> bool:
    """Whether a token's keys and values depend on its position and what it sees, and not on the columns between.

    So it is with full attention in every layer and positions that the caller gives. A sliding window counts columns,
    padding included; a recurrent state cannot be put back to where an answer began.
    """
    told = "position_ids" in inspect.signature(model.forward).parameters and not getattr(model.config, "alibi", False)
    return told and all(type(layer) is DynamicLayer for layer in _layers(model))


def _layers(model: PreTrainedModel) -> list[Any]:
    return cast(list[Any], DynamicCache(config=model.config).layers)


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, each [rows, room, heads, head size], of which the first `length` columns are read.

    Nothing is copied when a token is added. All of a token's numbers lie side by side, for `Memory` to lay them anew.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.length = 0
        self.rows = 0
        """Rows that are decoded: the first ones. Those behind have left."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Reserves the room. The states are [rows, heads, tokens, head size]."""
        keys, values = (_reserve(states, self.room) for states in (key_states, value_states))
        self.fill(keys, values, 0)

    def fill(self, keys: Tensor, values: Tensor, length: int) -> None:
        """Takes over tensors of this layer's shape whose first `length` columns are set."""
        self.keys, self.values = keys, values
        self.rows, self.length = len(keys), length
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Adds tokens to the rows that are decoded. Returns all of theirs, [rows, heads, columns, head size]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        begin, self.length = self.length, self.length + key_states.shape[-2]
        assert self.length <= self.room, (self.length, self.room)
        read: list[Tensor] = []
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            assert held is not None
            held[: self.rows, begin : self.length] = states.transpose(1, 2)
            read.append(held[: self.rows, : self.length].transpose(1, 2))
        return read[0], read[1]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Decodes these rows from now on, in this order.

        Where they are fewer, the others stay behind them. Where they are more, rows occur several times.
        """
        length, rows = self.length, self.rows
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        if len(indices) > rows:
            new_keys, new_values = (held.new_empty(len(indices), *held.shape[1:]) for held in (keys, values))
            new_keys[:, :length] = keys[indices, :length]
            new_values[:, :length] = values[indices, :length]
            self.fill(new_keys, new_values, length)
            return
        left = torch.ones(rows, dtype=torch.bool, device=indices.device)
        left[indices] = False
        order = torch.cat([indices, left.nonzero().squeeze(-1)])
        for held in (keys, values):
            held[:rows, :length] = held[order, :length]
        self.rows = len(indices)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.room


def _reserve(states: Tensor, room: int) -> Tensor:
    rows, heads, _, size = states.shape
    return states.new_empty(rows, room, heads, size)


class RoomyCache(Cache):
    """A cache with room for a turn. Rows that leave it are kept behind the others."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        super().__init__(layers=list(layers))

    def take_layers(self) -> list[_Layer]:
        """Its layers, which it no longer has."""
        layers, self.layers = cast(list[_Layer], self.layers), []
        return layers


@dataclass(frozen=True, slots=True)
class _Kept:
    """A conversation as it was read: its tokens, the row that they are in, and their columns, [T] each."""

    ids: NDArray[np.int64]
    row: int
    columns: NDArray[np.int64]


class Memory:
    """What a model has read of some conversations, so that only what was added since has to run.

    It holds the conversations of the last call that it was given to and no others, one rectangle of keys and values.
    What is known of a conversation is used where its tokens are the beginning of the prompt, token by token, and
    nothing of it otherwise: a context that was cut is read anew. It is of one model with the weights as they are: make
    a new one after an update.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Kept] = {}
        self._layers: list[_Layer] = []

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values it holds, padding left out."""
        return sum(len(kept.ids) for kept in self._kept.values())

    def known(self, name: Hashable, prompt: NDArray[np.int64]) -> int:
        """How many tokens at the beginning of a conversation's prompt need not run; never all of them."""
        kept = self._kept.get(name)
        if kept is None or len(kept.ids) >= len(prompt) or not np.array_equal(kept.ids, prompt[: len(kept.ids)]):
            return 0
        return len(kept.ids)

    def recall(self, names: Sequence[Hashable], lengths: Sequence[int], room: int) -> RoomyCache | None:
        """Lays out what is known of conversations, one a row, so that all end in the same column. Forgets the rest.

        Args:
            names: of conversations.
            lengths: what `known` said of each; 0: the row is left empty.
            room: columns of the new cache.

        Returns:
            A cache of max(lengths) columns; those before a row's own are padding. None: nothing is known of any.
        """
        width = max(lengths)
        if not width:
            self._kept, self._layers = {}, []
            return None
        columns = np.zeros((len(names), width), np.int64)
        old_room = self._layers[0].room
        for row, (name, length) in enumerate(zip(names, lengths, strict=True)):
            if length:
                kept = self._kept[name]
                columns[row, width - length :] = kept.row * old_room + kept.columns
        old, self._layers, self._kept = self._layers, [], {}
        layers: list[_Layer] = []
        while old:
            # One layer at a time, the old one freed at once: there are never two of the whole.
            layers.append(_laid_anew(old.pop(0), columns, room))
        return RoomyCache(layers)

    def keep(
        self,
        names: Sequence[Hashable],
        ids: Sequence[NDArray[np.int64]],
        columns: Sequence[NDArray[np.int64]],
        rows: Sequence[int],
        cache: Cache,
    ) -> None:
        """Takes over a cache that has been read into, and forgets what it held. Of a model that is not plain: nothing.

        Args:
            names: of the conversations.
            ids: tokens of each that are in the cache.
            columns: where in its row.
            rows: the row of each.
        """
        self._kept, self._layers = {}, []
        if isinstance(cache, RoomyCache):
            self._layers = cache.take_layers()
            self._kept = {
                name: _Kept(of_name, row, at) for name, of_name, row, at in zip(names, ids, rows, columns, strict=True)
            }


def _laid_anew(layer: _Layer, columns: NDArray[np.int64], room: int) -> _Layer:
    """A layer with other rows: each the columns of the flattened old ones that are named, [rows, width]."""
    rows, width = columns.shape

    def lay(held: Tensor | None) -> Tensor:
        assert held is not None
        new = held.new_empty(rows, room, *held.shape[2:])
        new[:, :width] = held.flatten(0, 1)[torch.from_numpy(columns).to(held.device)]
        return new

    anew = _Layer(room)
    anew.fill(lay(layer.keys), lay(layer.values), width)
    return anew
