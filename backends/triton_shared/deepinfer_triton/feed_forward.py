"""Op group ``experts`` with its feed-forward: routed and shared experts, and both combined.

Legend: T rows, D hidden size, I intermediate size, E experts, k experts per token, n slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.experts import Routing
from deepinfer.accelerator.weights import ExpertSlot, PreparedWeight, StoredExpert
from deepinfer_triton.arithmetic import refuse, require_dtype, require_width
from deepinfer_triton.configuration import launch
from deepinfer_triton.expert_product import down_configuration, gate_up_configuration
from deepinfer_triton.expert_tiles import ExpertTiles, expert_tiles
from deepinfer_triton.experts import TritonRoutingOps
from deepinfer_triton.row_codes import row_codes
from deepinfer_triton.rows import consecutive, flat_rows
from deepinfer_triton.stored_matrices import GROUP, Matrices, matrices_of
from deepinfer_triton.tile_product import CODES, has_long_tile, has_many_rows, product_of, tile_of


@dataclass(eq=False)
class PreparedExperts(PreparedWeight):
    """Experts in id order, and the clamp of their gates."""

    name: str
    nbytes: int
    gate: Matrices
    up: Matrices
    down: Matrices
    limit: float

    def expert_slots(self) -> tuple[ExpertSlot, ...]:
        """See :meth:`PreparedWeight.expert_slots`."""
        matrices = (self.gate, self.up, self.down)
        form = " ".join(each.form for each in matrices)
        tensors = [tensor for each in matrices for tensor in each.tensors]
        return tuple(ExpertSlot(form, tuple(tensor[number] for tensor in tensors)) for number in range(self.gate.count))


class TritonExpertOps(TritonRoutingOps):
    """Grouped products over the slots of each expert; slot outputs keep their place."""

    def __init__(self, options: OpOptions) -> None:
        super().__init__(options)
        self._invariant = options.batch_invariant

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare`."""
        if not experts:
            refuse("experts.prepare", "no experts were given; a layer has at least one")
        gate, up, down = (
            matrices_of("experts.prepare", [getattr(expert, part) for expert in experts]) for part in ("w1", "w3", "w2")
        )
        shapes = (up.format, up.out_features, up.in_features), (down.in_features, down.out_features)
        if shapes != ((gate.format, gate.out_features, gate.in_features), (gate.out_features, gate.in_features)):
            refuse("experts.prepare", f"gate, up and down of {experts[0].w1.name!r} do not fit each other")
        # One kernel multiplies with both; what only one of them allows is not used.
        fits = gate.fits_bfloat16 and up.fits_bfloat16
        gate.fits_bfloat16 = up.fits_bfloat16 = fits
        if gate.values.dtype != up.values.dtype:
            gate.values, up.values = gate.values.to(torch.float32), up.values.to(torch.float32)
        nbytes = gate.nbytes + up.nbytes + down.nbytes
        return PreparedExperts(experts[0].w1.name, nbytes, gate, up, down, limit)

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """See :meth:`ExpertOps.prepare_shared`."""
        return self.prepare((expert,), limit)

    def routed(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.routed`."""
        return self._routed(x_TD, routing, self._own("experts.routed", x_TD, experts), torch.float32)

    def shared(self, x_TD: Tensor, expert: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.shared`."""
        own = self._own("experts.shared", x_TD, expert)
        out_TD = torch.empty((x_TD.shape[0], own.gate.in_features), dtype=torch.float32, device=x_TD.device)
        self._feed_forward(x_TD, own, None, out_TD)
        return out_TD

    def local(self, x_TD: Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight) -> Tensor:
        """See :meth:`ExpertOps.local`."""
        own = self._own("experts.local", x_TD, experts)
        # Served slots are rounded to bfloat16 anyway: stored so, they cost half the traffic and lose nothing.
        stored = torch.bfloat16 if self.arithmetic.served else torch.float32
        return self.combine(self.shared(x_TD, shared), self._routed(x_TD, routing, own, stored))

    def _routed(self, x_TD: Tensor, routing: Routing, own: PreparedExperts, out: torch.dtype) -> Tensor:
        rows, top_k = routing.experts_Tk.shape
        require_dtype("experts.routed", "experts", routing.experts_Tk, torch.int64)
        # Zeros, because slots without an expert are written by nobody.
        slots_TkD = torch.zeros((rows, top_k, own.gate.in_features), dtype=out, device=x_TD.device)
        self._feed_forward(x_TD, own, routing, slots_TkD)
        return slots_TkD

    def _feed_forward(self, x_TD: Tensor, own: PreparedExperts, routing: Routing | None, out: Tensor) -> None:
        """Write the outputs of all slots, or of all rows where nothing is routed."""
        device, served, activation = x_TD.device, self.arithmetic.served, self.arithmetic.activation
        slots = x_TD.shape[0] if routing is None else routing.experts_Tk.numel()
        if slots == 0:
            return
        for matrices in (own.gate, own.up, own.down):
            matrices.move(device)
        product = product_of(own.gate, activation, quantises=served)
        down_product = product_of(own.down, activation, quantises=served)
        many_rows = has_long_tile(own.gate.format, product) and has_long_tile(own.down.format, down_product)
        many_rows = many_rows and has_many_rows(-(-slots // own.gate.count), invariant=self._invariant)
        tile = tile_of(own.gate.format, product, many_rows=many_rows)
        down_tile = tile_of(own.down.format, down_product, many_rows=many_rows)
        no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
        no_words = torch.empty(0, dtype=torch.int32, device=device)
        if routing is None:
            weights, top_k = torch.empty(0, dtype=torch.float32, device=device), 1
            tiles = ExpertTiles(*(no_words,) * 4, launched=-(-slots // tile.rows))
            down_tiles = tiles._replace(launched=-(-slots // down_tile.rows))
        else:
            weights = consecutive(routing.weights_Tk.to(torch.float32).reshape(-1))
            top_k = routing.experts_Tk.shape[1]
            tiles = down_tiles = expert_tiles(routing.experts_Tk, own.gate.count, tile.rows)
            if down_tile.rows != tile.rows:
                down_tiles = expert_tiles(routing.experts_Tk, own.gate.count, down_tile.rows)
        width, features = own.gate.out_features, own.gate.in_features
        encodes = down_product == CODES
        hidden_nI = torch.empty((slots, width), dtype=torch.uint8 if encodes else activation, device=device)
        scales_nG = torch.empty((slots, -(-width // GROUP)), dtype=torch.uint8, device=device) if encodes else no_bytes
        x, x_scales = row_codes(x_TD) if product == CODES else (flat_rows(x_TD), no_bytes)
        modes = {"many_rows": many_rows, "routed": routing is not None, "served": served}
        launch(
            gate_up_configuration(
                features,
                own.gate.values.dtype,
                activation,
                hidden_nI.dtype,
                kind=own.gate.format,
                product=product,
                **modes,
            ),
            (tiles.launched, -(-width // tile.columns)),
            x,
            x_scales,
            own.gate.values,
            own.gate.scales,
            own.up.values,
            own.up.scales,
            weights,
            *tiles[:4],
            hidden_nI,
            scales_nG,
            x.stride(0),
            slots,
            width,
            own.gate.scales.shape[1] if own.gate.is_quantised else 0,
            top_k,
            own.limit,
        )
        launch(
            down_configuration(
                width,
                own.down.values.dtype,
                hidden_nI.dtype,
                out.dtype,
                kind=own.down.format,
                product=down_product,
                **modes,
            ),
            (down_tiles.launched, -(-features // down_tile.columns)),
            hidden_nI,
            scales_nG,
            own.down.values,
            own.down.scales,
            weights,
            *down_tiles[:4],
            out,
            slots,
            features,
            own.down.scales.shape[1] if own.down.is_quantised else 0,
        )

    def _own(self, op_name: str, x_TD: Tensor, weight: PreparedWeight) -> PreparedExperts:
        if not isinstance(weight, PreparedExperts):
            refuse(op_name, f"the experts are a {type(weight).__qualname__} that another implementation prepared")
        require_width(op_name, "x", x_TD, weight.gate.in_features)
        require_dtype(op_name, "x", x_TD, self.arithmetic.activation)
        return weight
