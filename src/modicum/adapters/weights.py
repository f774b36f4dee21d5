"""The frozen weight under an adapter, whatever form and place it is kept in: read, and written.

Weights are fp32 [out, in] here, and whole, also where ranks hold parts of them.
"""

from __future__ import annotations

from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.linear_forms import form_of, full_weight, write_weight
from modicum.core.sharding import own_part, whole


def read(base: nn.Module, site: Site) -> Tensor:
    """The weight that a layer stands for: fp32 [out, in], not to be written into.

    Of a layer that is cut over ranks every rank calls this, and they gather it.
    """
    known = form_of(base) is not None
    stored = full_weight(base) if known else base.get_parameter("weight")
    return oriented(whole(stored.detach()).float(), site)


def write(base: nn.Module, site: Site, weight: Tensor) -> None:
    """Put a whole weight [out, in] into a layer, rounded as its form does; a rank, its own rows.

    Raises:
        InputError: the layer's form cannot stand for any weight.
    """
    rows = site.in_features if site.transposed else site.out_features
    like = next(p for p in base.parameters() if p.shape[:1] == (rows,))
    part, before = own_part(like.detach())
    own = oriented(weight, site)[before : before + part.shape[0]]
    if form_of(base) is None:
        part.copy_(own)
    else:
        write_weight(base, own)


def oriented(weight: Tensor, site: Site) -> Tensor:
    """A weight [out, in] as the base stores it, or one that is stored so as [out, in]."""
    return weight.T if site.transposed else weight


def is_exact(base: nn.Module) -> bool:
    """Whether a layer can hold any weight and gives it back, to its dtype.

    A quantized one does not give it back; one of low rank cannot hold it.

    >>> is_exact(nn.Linear(2, 2))
    True
    """
    form = form_of(base)
    return form is None or (form.exact and form.write is not None)


def round_trip(base: nn.Module, weight: Tensor) -> Tensor:
    """What would be left of a whole weight [out, in] in a layer of the same form: fp32."""
    form = form_of(base)
    return weight if form is None or form.exact else form.round_trip(weight).float()
