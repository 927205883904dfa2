"""Asks a running Baton about files and batches over HTTP. No file is held in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from app.cli.client import CliError, reason_of

KEY_VARIABLE = "BATON_API_KEY"
TIMEOUT_S = 60.0
OVER = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """`url`: where Baton answers, its route prefix included. Every method raises CliError."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        key = os.environ.get(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/")
        self._http = httpx.Client(transport=transport, timeout=TIMEOUT_S, headers=headers, trust_env=False)

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        """The id of a file that is sent as it is read."""
        with path.open("rb") as file:
            files = {"file": (path.name, file, "application/jsonl")}
            return str(self._ask("POST", "/v1/files", data={"purpose": "batch"}, files=files)["id"])

    def create(self, file_id: str, endpoint: str, window: str) -> dict[str, Any]:
        """A new batch."""
        asked = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        return self._ask("POST", "/v1/batches", json=asked)

    def batch(self, batch_id: str) -> dict[str, Any]:
        """A batch as it is now."""
        return self._ask("GET", f"/v1/batches/{quote(batch_id, safe='')}")

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """The batch, which ends as it is."""
        return self._ask("POST", f"/v1/batches/{quote(batch_id, safe='')}/cancel")

    def download(self, file_id: str, path: Path) -> None:
        """Write a file here. It has its name when it is whole."""
        part = path.with_name(f"{path.name}.part")
        with self._answered("GET", f"/v1/files/{quote(file_id, safe='')}/content") as response, part.open("wb") as file:
            for piece in response.iter_bytes():
                file.write(piece)
        part.replace(path)

    def _ask(self, method: str, path: str, **sent: Any) -> dict[str, Any]:
        with self._answered(method, path, **sent) as response:
            try:
                found = json.loads(response.read())
            except ValueError as error:
                raise CliError(f"{self._url} answered without JSON: it is not a Baton") from error
        if not isinstance(found, dict):
            raise CliError(f"{self._url} answered with no object: it is not a Baton")
        return found

    @contextmanager
    def _answered(self, method: str, path: str, **sent: Any) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, f"{self._url}{path}", **sent) as response:
                if response.status_code != 200:
                    raise CliError(_refusal(self._url, response.status_code, response.read()))
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise CliError(f"no Baton answers at {self._url}: {said}") from error


def _refusal(url: str, status: int, content: bytes) -> str:
    try:
        said = reason_of(json.loads(content))
    except ValueError:
        said = "without JSON"
    hint = f"; the variable {KEY_VARIABLE} holds the API key" if status in (401, 403) else ""
    return f"{url} answered {status}: {said}{hint}"
