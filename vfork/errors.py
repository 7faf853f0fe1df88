# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The one exception of vfork and its stable codes.

VF1xx edit files, VF2xx upstream sources, VF3xx project state, VF4xx pins, download
and release wheels, VF5xx assembling, building and syncing, VF6xx other releases, VF7xx
export to upstream. A code is never reused.
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
    "VF308": "upstream changed around an edit, and nobody accepted it",
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
    "VF511": "VLLM_GLM_DSA_EXTENSION is unknown",
    "VF512": "a tool that the extension needs is missing",
    "VF513": "VLLM_GLM_DSA_CUDA_ARCHS chooses no architectures",
    "VF514": "the extension does not compile",
    "VF515": "the extension would not load or run everywhere",
    "VF601": "the edited file is gone",
    "VF602": "the anchor is gone",
    "VF603": "the anchor became ambiguous",
    "VF604": "the edit does not fit the new source",
    "VF605": "the anchor seems to have moved to another file",
    "VF606": "the anchor seems to have another name or form",
    "VF607": "upstream has the edit's effect or the overlay's path",
    "VF608": "upstream changed what is next to the edit",
    "VF609": "upstream changed the definition around the edit",
    "VF610": "the edit resolves on the new release only",
    "VF611": "the edit is not meant for the new release",
    "VF612": "the edit and its surroundings are the same",
    "VF621": "a name of upstream that the fork uses is gone",
    "VF622": "a field, attribute, method or enum member that the fork uses is gone",
    "VF623": "a call does not fit the signature",
    "VF624": "an override does not fit the base class",
    "VF625": "a class leaves a method abstract",
    "VF626": "a dotted string names nothing",
    "VF627": "an operation is gone or changed",
    "VF628": "inserted statements read a name that nothing binds",
    "VF631": "a signature that the fork relies on changed",
    "VF632": "a value, default or type that the fork relies on changed",
    "VF633": "bases or decorators of a class that the fork relies on changed",
    "VF634": "a base class has a name that was the fork's alone",
    "VF635": "a definition cannot be told from the sources any more",
    "VF636": "code that the fork relies on changed",
    "VF637": "something may go past an edit",
    "VF638": "a hooked function lost a caller",
    "VF639": "a hooked function is called from elsewhere or in another way",
    "VF640": "the requirements changed",
    "VF641": "the package index has no such release",
    "VF642": "files do not compile on the new release",
    "VF643": "modules cannot be imported on the new release",
    "VF644": "tests fail on the new release",
    "VF645": "the edit cannot be accepted",
    "VF646": "something that drop_when or forwarded names may have come",
    "VF701": "upstream_topics.toml is missing or malformed",
    "VF702": "no topic of that name is declared",
    "VF703": "the topics name something that does not exist",
    "VF704": "no topic takes a file or an edit",
    "VF705": "an exported file or edit uses something that its topic lacks",
    "VF706": "a file cannot be exported as it is",
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
