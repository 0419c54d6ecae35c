"""powersgd: a matrix as the product of two thin ones (Vogels 2019)."""

import torch
from torch import Tensor

from paceline.comm.compression.form import Dice, Form, Method, is_finite
from paceline.comm.compression.message import Buffer, Reader, bytes_of
from paceline.comm.compression.spec import CompressionSpec

__all__ = ["PowerSgd"]


class PowerSgd(Method):
    """powersgd:r through parameter servers: each worker sends factors of its own matrix.

    P = M Q, made orthonormal; Q = Mᵀ P; the server takes P Qᵀ. Q is kept as the next start. The paper
    averages P and Q over workers, which needs two rounds a step; here the servers average the products.
    The first dimension gives the rows, the others the columns. Pieces that would not shrink (1-D, parts of
    tensors, small ones) are sent as they are.

    The server's product equals the encoder's to the last bit only where both use the same matrix kernels.
    """

    code = 9

    def __init__(self, form: Form, spec: CompressionSpec) -> None:
        super().__init__(form, spec)
        assert spec.rank is not None
        self._matrices: dict[int, tuple[int, int, int]] = {}
        """By piece: rows, columns, rank. Pieces that are not here are sent as they are."""
        for i, piece in enumerate(form.pieces):
            if len(piece.shape) > 1:
                rows = piece.shape[0]
                columns = (piece.stop - piece.start) // max(rows, 1)
                rank = min(spec.rank, rows, columns)
                if rank * (rows + columns) < rows * columns:
                    self._matrices[i] = rows, columns, rank
        self._starts: dict[int, Tensor] | None = None

    def encode(self, values: Tensor, dice: Dice) -> list[Buffer] | None:
        form = self.form
        parts: list[Buffer] = []
        old, new = self._own(), {}
        for i, piece in enumerate(form.pieces):
            part = values[piece.start : piece.stop]
            if i not in self._matrices:
                sent = form.narrow(part).clone()
                part.sub_(form.delivered(sent))
                parts.append(bytes_of(sent))
                continue
            matrix = part.view(self._matrices[i][:2])
            # Contiguous as in the decoder: another memory order may take another kernel, and round otherwise.
            left = _orthonormal(matrix @ _start(old[i], dice)).contiguous()
            right = (matrix.T @ left).contiguous()
            matrix.sub_(form.delivered(left @ right.T))
            new[i] = right
            parts += [bytes_of(left), bytes_of(right)]
        if not is_finite(values) or not all(map(is_finite, new.values())):
            return None
        self._starts = new
        return parts

    def decode(self, reader: Reader, out: Tensor) -> None:
        form = self.form
        found: list[Tensor | tuple[Tensor, Tensor]] = []
        for i, piece in enumerate(form.pieces):
            if i in self._matrices:
                rows, columns, rank = self._matrices[i]
                left = reader.bounded(rows * rank, form.work, torch.finfo(form.work).max)
                right = reader.bounded(columns * rank, form.work, torch.finfo(form.work).max)
                found.append((left.view(rows, rank), right.view(columns, rank)))
            else:
                found.append(reader.tensor(piece.stop - piece.start, form.dtype))
        reader.end()
        for piece, values in zip(form.pieces, found, strict=True):
            if isinstance(values, tuple):
                values = form.narrow(values[0] @ values[1].T).view(-1)
            out[piece.start : piece.stop] = values
        form.clear_gaps(out)

    def _own(self) -> dict[int, Tensor]:
        if self._starts is None:  # zero columns are drawn when they are needed
            self._starts = {
                i: torch.zeros(columns, rank, dtype=self.form.work)
                for i, (_, columns, rank) in self._matrices.items()
            }
        return self._starts

    def state(self) -> dict[str, Tensor]:
        return {f"q{i}": q for i, q in self._own().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        self._starts = {i: state[f"q{i}"].clone() for i in self._matrices}


def _start(q: Tensor, dice: Dice) -> Tensor:
    """Columns of length one. A zero column would stay zero for ever: it is drawn anew."""
    lengths = torch.linalg.vector_norm(q, dim=0, dtype=torch.float64)
    if bool((lengths > 0).all()):
        return torch.div(q, lengths).to(q.dtype)
    return torch.where(lengths > 0, torch.div(q, lengths).to(q.dtype), dice.normal_like(q))


def _orthonormal(p: Tensor) -> Tensor:
    """An orthonormal basis whose span holds the columns. Householder's needs no guard for zero columns."""
    basis: Tensor = torch.linalg.qr(p).Q
    return basis
