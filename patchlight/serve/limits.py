"""How much a client may ask for."""

from dataclasses import dataclass

MiB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What is refused beyond these, with a status that says so."""

    upload_bytes: int = 64 * MiB  # of one photo, its multipart frame included
    body_bytes: int = MiB // 4  # of any other request
    predicted: int = 32  # photos or images in one request for predictions; together no larger than one upload
    pixels: int = 100_000_000  # of one photo
    uploads: int = 8  # read at the same time; others wait, unread
    requests: int = 256  # at the same time; past them 503
    queue: int = 64  # photos that wait for the model; past them 503
    batch: int = 8  # photos that an accelerator looks at together
    waiting_work: int = 128  # previews, crops and the like that wait for a thread; past them 503
    body_seconds: float = 60.0  # until a request has been sent whole
    answer_seconds: float = 120.0  # until it is answered
    photos: int = 256  # kept; past them the one that was used least lately goes
    photo_bytes: int = 512 * MiB  # of all of them
    seen_bytes: int = 512 * MiB  # of what the models did with photos, kept so that it is not done again
    zipped: int = 128  # photos in one archive
    zip_bytes: int = 512 * MiB
    image_size: int = 1024  # pixels of a side, in what is asked of costs
    timed_seconds: float = 4.0  # that one forward pass may take if it is to be measured
