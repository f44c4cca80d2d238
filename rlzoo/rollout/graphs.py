"""Decodes in steps that have constant shapes and copy nothing to the host, so a CUDA graph can replay them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlzoo.rollout.draws import Truncation, draw
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.open_responses import OpenResponses, rounded

CHECKED = 32
"""Number of tokens after which the host checks which responses have ended. It waits for the device only at these checks."""


class StaticSteps:
    """Draws the tokens of open responses with `FusedStep`, in steps whose state is in tensors on the device.

    Responses that have ended are still computed until they are removed, but their tokens, log-probs and positions no longer
    change. They are removed when at most half of the rows are open. Within a call of `decode`, the number of rows never grows
    and the number of columns never shrinks, so each combination is captured at most once. A new graph replaces the old one.
    """

    def __init__(
        self,
        responses: OpenResponses,
        logits: Tensor,
        numbers: Tensor,
        ends: Tensor,
        pad_id: int,
        temperature: float,
        truncation: Truncation | None,
    ) -> None:
        """Allocate the state and draw the first tokens.

        Args:
            responses: responses after their first pass, with a `FusedStep` and with columns padded by `rounded`.
            logits: ``(B, V)`` logits from that pass.
            numbers: float64 ``(T, B)`` random numbers in [0, 1).
            ends: ``(E,)`` tokens that end a response.
            pad_id: token ID that fills the positions after the end of a response.
            temperature: sampling temperature.
            truncation: restricts which tokens are drawn.
        """
        self.responses, self.numbers, self.ends, self.pad_id = responses, numbers, ends, pad_id
        self.temperature, self.truncation = temperature, truncation
        device, (limit, number) = responses.device, numbers.shape
        self.tokens = torch.full((number, limit), pad_id, device=device)
        self.log_probs = torch.zeros(number, limit, device=device)
        self.kept: list[tuple[Tensor, KeptSets]] = []  # for each token, the rows and their sets; empty without truncation
        self.place = torch.zeros(1, dtype=torch.long, device=device)  # index of the next token in the response
        self.is_open = torch.ones(number, dtype=torch.bool, device=device)  # (R,) for the R rows that are computed
        self.drawn = torch.full((number,), pad_id, device=device)  # (R,) last tokens
        self.is_kept = torch.empty_like(logits, dtype=torch.bool)  # (R, V), written only with truncation
        self.layers = responses.layers
        self.length = self.layers[0].length  # number of columns in use
        self.column = torch.tensor([self.length], device=device)  # the column that is written next
        for layer in self.layers:
            layer.write_at(self.column)
        self.columns = torch.arange(self.layers[0].room, device=device)
        self.shape = (0, 0)  # rows and columns of a step
        self._draw(logits)
        self._collect()

    def run(self) -> None:
        """Draw all other tokens. Write them to ``tokens`` and their log-probs to ``log_probs``."""
        done, limit = 1, self.tokens.shape[1]
        while done < limit and (num_open := int(self.is_open.sum())):
            self._remove(num_open)
            for _ in range(min(CHECKED, limit - done)):
                self._advance()
                done += 1

    def _advance(self) -> None:
        """Draw one more token in each row."""
        self.length += 1
        shape = len(self.drawn), rounded(self.length)
        if shape != self.shape:
            self.shape, self.step = shape, Replayed(self._step, self.responses.device)
        for layer in self.layers:  # outside the step, because replaying a step changes only tensors
            layer.length, layer.width = self.length, shape[1]
        self.step()
        self._collect()

    def _step(self) -> None:
        """Compute the logits after the last tokens and draw the next tokens. All changes are made in place."""
        responses = self.responses
        assert responses.step is not None, "steps of constant shapes require fused steps"
        visible = (self.columns[: self.shape[1]] <= self.column)[None, None, None]
        if responses.mask is not None:
            visible = visible & responses.mask[..., : self.shape[1]]
        added = torch.zeros_like(visible, dtype=self.layers[0].values.dtype).masked_fill_(~visible, -torch.inf)
        logits = responses.step(self.drawn, responses.positions[:, 0], self.layers, added)
        responses.positions.add_(self.is_open[:, None])
        self.column.add_(1)
        self._draw(logits)

    def _draw(self, logits: Tensor) -> None:
        rows = self.responses.rows
        if self.truncation is not None:
            logits = self.truncation(logits, self.temperature)
            self.is_kept.copy_(logits > -torch.inf)
        numbers = self.numbers.index_select(0, self.place)[0].index_select(0, rows)
        drawn, reported = draw(logits, numbers, self.temperature)
        self.drawn.copy_(torch.where(self.is_open, drawn, self.pad_id))
        self.tokens[rows, self.place] = self.drawn
        self.log_probs[rows, self.place] = torch.where(self.is_open, reported, 0.0)
        self.is_open.logical_and_(~(drawn[:, None] == self.ends).any(dim=1))
        self.place.add_(1)

    def _collect(self) -> None:
        """Read the sets of kept tokens. Their sizes vary, so this method is not in the graph and waits for the device."""
        if self.truncation is not None:
            self.kept.append((self.responses.rows, KeptSets.of_mask(self.is_kept)))

    def _remove(self, num_open: int) -> None:
        """Remove ended responses, halving the number of rows as often as the number of open responses permits."""
        rows = number = len(self.drawn)
        while number // 2 >= num_open:
            number //= 2
        if number == rows:
            return
        ended = ~self.is_open
        removed = ended & (ended.cumsum(0) <= rows - number)
        state = self.responses.close(removed, torch.stack([self.drawn, self.is_open.long()], dim=1))
        self.drawn, self.is_open, self.is_kept = state[:, 0].clone(), state[:, 1].bool(), self.is_kept[:number]


class Replayed:
    """Calls a function that has no arguments or result. On a CUDA device, later calls replay a CUDA graph of the function."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        """Store a function whose operations have constant shapes and use the same tensors in every call."""
        self.function, self.device = function, device
        self.stream: torch.cuda.Stream | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Call the function the first time, capture it the second time, and replay it afterwards."""
        if self.device.type != "cuda":
            self.function()
            return
        with torch.cuda.device(self.device):
            if self.stream is None:  # this call also loads kernels, which must not happen during a capture
                self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    self.function()
                torch.cuda.current_stream().wait_stream(self.stream)
                return
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                # a learner in another thread may allocate memory during the capture
                with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                    self.function()
            self.graph.replay()
