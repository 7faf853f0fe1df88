# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The one exception of vfork and its stable codes.

VF1xx edit files, VF2xx upstream sources, VF3xx project state, VF4xx pins, download
and release wheels, VF5xx assembling, building and syncing. A code is never reused.
"""

from dataclasses import dataclass

CODES: dict[str, str] = {
    "VF101": "the edit file cannot be read as Python",
    "VF102": "the edit file is not data only",
    "VF103": "a declaration has an unknown, missing or wrongly typed argument",
    "VF104": "why, drop_when, forwarded or test is missing or malformed",
    "VF105": "the owner test does not exist",
    "VF106": "an edit id is used twice",
    "VF107": "the target is vendored or generated and must not be edited",
    "VF108": "the operation does not fit the anchor",
    "VF109": "the inserted source is not acceptable",
    "VF110": "the edit inserts too many statements",
    "VF111": "the release specifier or base name is not valid",
    "VF112": "the statement pattern is not one Python statement",
    "VF201": "the target file is not in the release",
    "VF202": "the upstream source cannot be read",
    "VF203": "the upstream source is not pristine",
    "VF204": "the anchor matches nothing",
    "VF205": "the anchor matches more than once",
    "VF206": "upstream already has what the edit adds",
    "VF207": "the source layout at the anchor is not supported",
    "VF208": "two edits overlap",
    "VF209": "the edited source does not parse",
    "VF210": "the inserted statements could never run",
    "VF301": "edits.lock is missing or unreadable",
    "VF302": "edits.lock is out of date",
    "VF303": "the generated register is missing or out of date",
    "VF304": "an overlay path exists upstream",
    "VF305": "a budget is exceeded",
    "VF306": "no project root",
    "VF307": "lines of the checkout also stand in the release",
    "VF401": "upstream.toml is missing or malformed",
    "VF402": "no base of that name is pinned",
    "VF403": "the release could not be downloaded",
    "VF404": "the release has another hash than the pinned one",
    "VF405": "the release is not a sound wheel",
    "VF407": "the cache directory cannot be used",
    "VF501": "the output directory holds something else",
    "VF502": "an overlay __init__.py would take over an upstream directory",
    "VF503": "the overlay holds something that is not a file",
    "VF504": "a requirement change does not fit the release",
    "VF505": "the build number cannot be told",
    "VF506": "no fork is installed there",
    "VF507": "the installed fork stands on another release",
    "VF508": "VLLM_TARGET_DEVICE is unknown",
    "VF509": "SOURCE_DATE_EPOCH is not a date",
    "VF510": "the files of the checkout cannot be listed",
}


@dataclass(frozen=True)
class EditRef:
    """Names an edit in a report: its id and its edit file, relative to the root."""

    id: str
    file: str


class VforkError(Exception):
    """What went wrong, where, and what to do next.

    `excerpt` holds upstream lines with their numbers, matches marked with `>`.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        edit: EditRef | None = None,
        excerpt: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.edit = edit
        self.excerpt = excerpt
        self.hint = hint

    def to_dict(self) -> dict[str, object]:
        return {
            "code": self.code,
            "message": self.message,
            "edit": {"id": self.edit.id, "file": self.edit.file} if self.edit else None,
            "excerpt": self.excerpt,
            "hint": self.hint,
        }

    def __str__(self) -> str:
        lines = [f"{self.code}: {self.message}"]
        if self.edit:
            lines.append(f"  edit: {self.edit.id} ({self.edit.file})")
        lines.extend(f"    {line}" for line in self.excerpt.splitlines())
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)
