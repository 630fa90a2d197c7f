"""What tests of the page of `patchlight serve` share."""

import time
from typing import Any

from served import Served


class Failures(list[str]):
    """What must not happen on any page: failing scripts, breaches of the policy, requests to elsewhere."""

    def watch(self, page: Any, served: Served) -> None:
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: self.append(str(error)))
        page.on("console", lambda line: self.append(line.text) if "Content Security Policy" in line.text else None)
        page.on(
            "request", lambda asked: None if asked.url.startswith((served.url, "blob:")) else self.append(asked.url)
        )


def wait_until(page: Any, expression: str, seconds: float = 120) -> None:
    """As Playwright's `wait_for_function`, which the page's own policy forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"did not come about: {expression}"
        time.sleep(0.03)
