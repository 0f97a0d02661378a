"""What went wrong, said to the person who can put it right."""


class UserError(ValueError):
    """A mistake in what the user gave: printed as one line, without a traceback.

    Messages name the thing that is wrong and what to do about it.
    """


class ModelError(UserError):
    """A model, drafter or tokenizer that cannot be used: missing, damaged, unsupported or mismatched."""


class RequestError(UserError):
    """A request the engine refuses: empty, too long, or with parameters that make no sense."""


class StepFailure(Exception):
    """A step failed over one request, before anything was committed: without that request it can be repeated."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"request {request_id} failed in a step")
        self.request_id = request_id
