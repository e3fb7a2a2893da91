"""What runs next: pure decisions from plain values. No torch, no clock, no randomness; nothing here owns anything.

``waiting`` orders the queue, ``siblings`` holds back copies of a prompt, ``chunks`` cuts prefills, ``encoding`` packs
encoder launches, ``victims`` says who gives its pages back.
"""

from kestrel.plan.chunks import Chunk, Prefill, chunk_end, plan_chunks
from kestrel.plan.encoding import EncodeItem, plan_encode
from kestrel.plan.siblings import Siblings
from kestrel.plan.victims import Candidate, choose_victim
from kestrel.plan.waiting import WaitQueue

__all__ = [
    "Candidate",
    "Chunk",
    "EncodeItem",
    "Prefill",
    "Siblings",
    "WaitQueue",
    "choose_victim",
    "chunk_end",
    "plan_chunks",
    "plan_encode",
]
