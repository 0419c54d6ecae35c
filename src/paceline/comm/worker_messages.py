"""Messages between workers and servers: one class and one kind of frame for each.

Requests are completed on their way out: the link's carrier adds its fields. So they are mutable.
"""

from dataclasses import dataclass
from typing import Final

from paceline.comm.frames import Kind
from paceline.comm.message_codec import Catalogue, message
from paceline.core.json_types import Json, JsonObject
from paceline.core.placement import Placement

__all__ = [
    "ADMIT",
    "ATTACHED",
    "CALL_REPLY",
    "EARLY_SLICE",
    "GRANT",
    "LEAD_REPLY",
    "LINK_RESUMED",
    "OFFER_ANSWER",
    "ORDERED",
    "SENDS",
    "TO_SERVER",
    "VERDICT",
    "AdmitReply",
    "AssignMessage",
    "AttachMessage",
    "AttachedReply",
    "BuffersMessage",
    "CallMessage",
    "CallReply",
    "DetachMessage",
    "EarlySliceMessage",
    "GrantReply",
    "LeadNews",
    "LeaderQuestion",
    "LinkResumed",
    "LoadStateMessage",
    "OfferIncomplete",
    "OfferMessage",
    "OrderedMessage",
    "PreparedModel",
    "ProbeMessage",
    "PullMessage",
    "PushMessage",
    "SavedMessage",
    "SendsMessage",
    "StartFrom",
    "StateAsked",
    "TakeMessage",
    "ToServer",
    "VerdictReply",
    "VoteMessage",
    "WeightsMessage",
    "WeightsWanted",
]

# --- joining --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class PreparedModel:
    """What a worker has prepared. `paceline.params` knows the parts, and checks them when it reads them."""

    layout: JsonObject
    optimizer: JsonObject
    data: JsonObject | None
    """Facts on the training data; None: no loader was prepared."""
    state_keys: tuple[str, ...]
    numerics: JsonObject
    models: int = 1
    """Number of models."""
    calls: int = 1
    """Number of calls of prepare() that brought them."""


@message(Kind.OFFER)
@dataclass(slots=True, kw_only=True)
class OfferMessage(PreparedModel):
    """worker → leader: this worker's model."""

    device: str | None = None
    """Id of the device that the models are on, if processes can share its memory."""


@message(Kind.WANT_WEIGHTS)
@dataclass(slots=True)
class WeightsWanted:
    """leader → worker 0: send your weights."""


@message(Kind.WEIGHTS)
@dataclass(slots=True)
class WeightsMessage:
    """worker 0 → leader: the parameter space, and behind it frozen parameters and buffers."""

    extras_bytes: int


@message(Kind.ADOPTED)
@dataclass(slots=True, kw_only=True)
class StartFrom:
    """leader → worker: the run has the model. Behind it the tensors that the worker starts from."""

    epoch: int
    mode: str
    resumed: bool
    placement: Placement
    servers: dict[int, JsonObject]
    """Addresses of all servers."""
    replicated: bool
    carrier: str | None = None
    """`device`: the servers' memory is on the worker's device."""


@message(Kind.INCOMPLETE)
@dataclass(slots=True)
class OfferIncomplete:
    """leader → worker: the run was prepared by more calls of prepare() than this offer."""


@message(Kind.ATTACH)
@dataclass(slots=True, kw_only=True)
class AttachMessage:
    """worker → server: carry my gradients from here on. The link's carrier says how."""

    fingerprint: str
    incarnation: int
    pid: int = 0
    keeps: bool = False
    """Whether a link that breaks is resumed over a new socket."""
    carrier: str
    sends: tuple[int, ...] | None = None
    """Indices of the slices that pushes bring; None: all that the server holds."""
    compress: str = "none"
    compress_replies: bool = False
    in_place: bool = False
    """Whether the worker can read the server's own memory."""
    listens: JsonObject | None = None
    """Where the root of a group listens for its members."""


@message(Kind.SENDS)
@dataclass(slots=True)
class SendsMessage:
    """worker → server: pushes bring these slices from now on."""

    slices: tuple[int, ...]


# --- requests -------------------------------------------------------------------------------------------


@message(Kind.PUSH)
@dataclass(slots=True, kw_only=True)
class PushMessage:
    """worker → server: a gradient, with what became of the samples that it was computed from."""

    n: int
    """Number of the request."""
    sequence: int
    """Number of the push; assigns are numbered with pushes."""
    read_version: int
    samples: int = 0
    leases: tuple[int, ...] = ()
    optimizer: int = 0
    weight: int = 0
    """Samples that count for this optimizer, where there are several and it is not `samples`."""
    settings: tuple[JsonObject, ...] | None = None
    """Settings of all parameter groups; None: as before."""
    missing: tuple[int, ...] = ()
    """Tensors without a gradient."""
    void: bool = False
    """It held NaN or Inf: it keeps its place in the order, and is not applied."""
    carries: str = "slot"
    """`slot`: a gradient; `parameters`, `nothing`: see allreduce."""
    norm: float | None = None
    refused: tuple[int, ...] = ()
    logged: int = 0
    skipped: tuple[int, ...] | None = None
    skipped_samples: int = 0
    ready: int = 0
    """Number of the announced placement that this worker is ready for; 0: of none."""
    fetch: bool = True
    load: int | None = None
    residual: float | None = None
    """L2 norm of the gradient that the encoders hold back."""
    sizes: tuple[int, ...] | None = None
    """Bytes of each compressed slice behind the message."""
    slices: tuple[int, ...] | None = None
    """Positions of the slices behind the message; None: all. The others left during backward."""
    fence: int | None = None
    """Number of the device's flag that says when the gradient is there."""


@message(Kind.PULL)
@dataclass(slots=True, kw_only=True)
class PullMessage:
    """worker → server: an answer in the order, please; mostly with fresh parameters."""

    n: int
    sequence: int
    read_version: int
    ready: int = 0
    fetch: bool = True
    load: int | None = None
    """Number of the optimizer state that the leader is to order."""
    without: tuple[int, ...] = ()
    """Servers that this worker cannot reach any more."""


@message(Kind.ASSIGN)
@dataclass(slots=True, kw_only=True)
class AssignMessage:
    """worker → server: overwrite the parameters with these."""

    n: int
    sequence: int
    read_version: int
    ready: int = 0
    fetch: bool = True
    load: int | None = None
    fence: int | None = None


@message(Kind.SLICE)
@dataclass(slots=True)
class EarlySliceMessage:
    """worker → server: a slice of the push in the making."""

    at: int
    """Its position among those that pushes bring."""


@message(Kind.PROBE)
@dataclass(slots=True)
class ProbeMessage:
    """worker → server: still waiting; server → worker: this came behind all that was sent."""


@message(Kind.TAKE)
@dataclass(slots=True, kw_only=True)
class TakeMessage:
    """worker → leader: leases, please."""

    epoch: int
    limit: int
    wait: bool
    give_back: tuple[int, ...] = ()
    """Leases that this worker will not use."""
    carry: tuple[int, ...] = ()
    """Leases that it has used, and whose gradient goes into a later push."""
    skipped: tuple[int, ...] | None = None
    skipped_samples: int = 0
    logged: int = 0
    order: tuple[str, str] | None = None
    """Fingerprint of the epoch's order of samples, and the name of the sampler that drew it."""
    ready: int = 0
    n: int = 0


@message(Kind.VOTE)
@dataclass(slots=True, kw_only=True)
class VoteMessage:
    """worker → leader: does the run end early?"""

    who: str
    wants: bool
    n: int
    ready: int = 0


@message(Kind.CALL)
@dataclass(slots=True, kw_only=True)
class CallMessage:
    """worker → leader: a small value for the others that call at the same place."""

    place: str
    value: str
    n: int
    ready: int = 0


# --- state ----------------------------------------------------------------------------------------------


@message(Kind.STATE)
@dataclass(slots=True)
class StateAsked:
    """worker → server: the parameters and the optimizer state, please; server → worker: behind this."""


@message(Kind.LOAD)
@dataclass(slots=True, kw_only=True)
class LoadStateMessage:
    """worker → server: behind it an optimizer state, which the leader will order to be taken over."""

    number: int
    optimizer: int = 0


@message(Kind.SAVED)
@dataclass(slots=True)
class SavedMessage:
    """worker → server: behind it this worker's part of a checkpoint."""

    cut: int = 0
    """Version of that checkpoint, if the worker knows it."""


@message(Kind.BUFFERS)
@dataclass(slots=True)
class BuffersMessage:
    """worker → server: behind it the present buffers, for workers that join later."""


@message(Kind.DETACH)
@dataclass(slots=True, kw_only=True)
class DetachMessage:
    """worker → server: the worker leaves in order."""

    left: bool = False
    """Its script has not ended: the run wanted it to leave, or it will join again."""
    skipped: tuple[int, ...] | None = None
    skipped_samples: int = 0
    logged: int = 0


# --- replies --------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class LeadNews:
    """What every reply of the leader can tell a worker beside its answer."""

    on: int | None = None
    """Worker whose message made the answer possible; None: nobody was waited for."""
    held: float | None = None
    """Seconds in which that worker was waited for."""
    leave: bool = False
    """The worker is to leave the run after its present step."""
    stop: bool = False
    """The run ends early."""
    mode: str | None = None
    """The run's mode, if the worker does not know it yet."""
    next: Json = None
    """A placement to come, and the addresses of the servers that are new in it."""
    placement: Json = None
    """The present placement, if the worker does not know it yet."""
    save: int | None = None
    """Version of the checkpoint that waits for this worker's part."""


@message(Kind.ADMIT)
@dataclass(slots=True, kw_only=True)
class AdmitReply(LeadNews):
    """server → worker: a push, pull or assign is answered; go on."""

    version: int
    samples: int | None = None
    """Samples applied in the run so far. Only the leader says so, as with the fields below."""
    done: int | None = None
    """Samples of the present epoch that are settled; None: the run has no leases."""
    others: bool = False
    """The run began with one worker and has more now."""
    cut: bool = False
    """allreduce: a checkpoint follows the next push, which is to bring the worker's parameters."""
    settled: int | None = None
    """The fates of all pushes up to this one are known; None: the worker need not know."""
    unapplied: tuple[int, ...] = ()
    """Those of them that were not applied."""
    owned: tuple[int, ...] | None = None
    """Slices that this server answers for from here on; None: as before."""
    sizes: tuple[int, ...] | None = None
    """Bytes of each slice behind the message; None: they are not compressed."""
    fence: int | None = None
    """Number of the device's flag that says when the parameters are there."""
    copy: str | None = None
    """Handle of the device memory with the worker's copy of the parameters, if it is new."""


@message(Kind.ATTACHED)
@dataclass(slots=True, kw_only=True)
class AttachedReply:
    """server → worker: attached; the parameters are behind this. Followers say nothing of the run."""

    version: int | None = None
    mode: str | None = None
    samples: int | None = None
    done: int | None = None
    others: bool = False
    group: JsonObject | None = None
    """Address at which the root of the worker's group listens."""
    cut: bool = False
    next: Json = None
    stop: bool = False
    placement: Json = None
    servers: dict[int, JsonObject] | None = None
    """Addresses of all servers: some may have come while the worker joined."""
    owned: tuple[int, ...] | None = None
    parameters: str | None = None
    """Handle of the device memory with the parameters; the gradients' and the copy's follow."""
    gradients: str | None = None
    fence: int | None = None
    copy: str | None = None


@message(Kind.GRANT)
@dataclass(slots=True, kw_only=True)
class GrantReply(LeadNews):
    """leader → worker: leases."""

    leases: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """The id of each, and its ranges of positions in the epoch's order."""
    over: bool
    """The epoch has no more."""
    version: int


@message(Kind.VERDICT)
@dataclass(slots=True, kw_only=True)
class VerdictReply(LeadNews):
    """leader → worker: a vote is answered; `stop` is the verdict."""


@message(Kind.ANSWER)
@dataclass(slots=True, kw_only=True)
class CallReply(LeadNews):
    """leader → worker: a call is answered."""

    values: tuple[str, ...]
    """What the callers brought, by rank."""


@message(Kind.RESUMED)
@dataclass(slots=True)
class LinkResumed:
    """server → worker: the link goes on over this socket."""

    received: int
    """Number of the worker's frames that have come."""


OrderedMessage = PushMessage | PullMessage | AssignMessage
"""A request to all servers, which the order answers."""
LeaderQuestion = TakeMessage | VoteMessage | CallMessage
"""A request that the leader alone answers."""
ToServer = (
    OfferMessage
    | WeightsMessage
    | AttachMessage
    | SendsMessage
    | PushMessage
    | PullMessage
    | AssignMessage
    | ProbeMessage
    | TakeMessage
    | VoteMessage
    | CallMessage
    | StateAsked
    | LoadStateMessage
    | SavedMessage
    | BuffersMessage
    | DetachMessage
)

TO_SERVER: Final[Catalogue[ToServer]] = Catalogue(ToServer, "a server")
EARLY_SLICE: Final[Catalogue[EarlySliceMessage]] = Catalogue(EarlySliceMessage, "a server")
SENDS: Final[Catalogue[SendsMessage]] = Catalogue(SendsMessage, "a server")
ORDERED: Final[Catalogue[OrderedMessage]] = Catalogue(OrderedMessage, "a server")
OFFER_ANSWER: Final[Catalogue[StartFrom | OfferIncomplete]] = Catalogue(
    StartFrom | OfferIncomplete, "a worker that offered its model"
)
ATTACHED: Final[Catalogue[AttachedReply]] = Catalogue(AttachedReply, "a worker that attaches")
ADMIT: Final[Catalogue[AdmitReply]] = Catalogue(AdmitReply, "a worker that pushed or pulled")
LINK_RESUMED: Final[Catalogue[LinkResumed]] = Catalogue(LinkResumed, "a worker whose link broke")
GRANT: Final[Catalogue[GrantReply]] = Catalogue(GrantReply, "a worker that asked for leases")
LEAD_REPLY: Final[Catalogue[GrantReply | VerdictReply | CallReply]] = Catalogue(
    GrantReply | VerdictReply | CallReply, "a worker that asked the leader"
)
VERDICT: Final[Catalogue[VerdictReply]] = Catalogue(VerdictReply, "a worker that voted")
CALL_REPLY: Final[Catalogue[CallReply]] = Catalogue(CallReply, "a worker that called")
