"""How drafts and prompts share the tokens of a step: one rule for the server and for the simulator."""

# While prompts wait, drafts leave them this share of a step; otherwise a full batch of long drafts starves them.
_PROMPT_SHARE = 4
# And this share prompts leave to drafts that need not be verified.
_DRAFT_SHARE = 8


def room_for_drafts(num_decodes: int, max_tokens: int, *, has_prompts: bool) -> int:
    """Most drafts beside `num_decodes` decoding requests in a step of `max_tokens`."""
    room = max_tokens - num_decodes
    return room - min(room, max_tokens // _PROMPT_SHARE) if has_prompts else room


def reserved_for_drafts(num_drafts: int, num_floor: int, room: int, max_tokens: int) -> int:
    """Of `num_drafts` offered, those that prompts leave room for if only `num_floor` must be verified.

    `room` is that of `room_for_drafts`.
    """
    return min(max(num_floor, min(num_drafts, max_tokens // _DRAFT_SHARE)), room)
