"""The pages keep their promises: every link leads somewhere, and every function and test that is named exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for page in [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"] if page.is_file()
)
ALGORITHM = ROOT / "docs" / "algorithm.md"
FILE_ENDINGS = ("py", "md", "toml", "txt", "tex", "png")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[tuple[str, str]]:
    """(text, target) of every link and picture that stays inside the project."""
    text = prose(page)
    found = re.findall(r"\[([^\]]*)\]\(([^)\s]+)[^)]*\)", text)
    found += [("", target) for target in re.findall(r'\b(?:src|href)="([^"]+)"', text)]
    found += [("", target) for target in re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)]
    return [(text, target) for text, target in found if not re.match(r"(https?|mailto):", target)]


def target_file(page: Path, target: str) -> Path:
    return (page.parent / target.partition("#")[0]).resolve() if not target.startswith("#") else page


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links."""
    headings = re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """The names that these statements bind, each with the body behind it."""
    bound: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound[node.name] = []
        elif isinstance(node, ast.ClassDef):
            bound[node.name] = node.body
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: [] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id: [] for target in targets if isinstance(target, ast.Name)}
    return bound


def defined_in(file: Path, parts: list[str]) -> bool:
    body = ast.parse(file.read_text("utf-8")).body
    for part in parts:
        bound = names(body)
        if part not in bound:
            return False
        body = bound[part]
    return True


def source_of(reference: str) -> Path | None:
    """The file that defines a dotted name such as core.kernel.Updater.mix, or None."""
    parts = reference.removeprefix("offbeat.").split(".")
    for depth in range(len(parts), -1, -1):
        stem = "/".join(parts[:depth])
        for file in (f"src/offbeat/{stem}.py", f"src/offbeat/{stem}/__init__.py", f"examples/{stem}.py"):
            if (ROOT / file).is_file():
                return ROOT / file if defined_in(ROOT / file, parts[depth:]) else None
    return None


def references(page: Path) -> list[str]:
    """Every `dotted.name` in code type."""
    spans = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)+)`", prose(page))
    return [span for span in spans if span.rpartition(".")[2] not in FILE_ENDINGS]


def where_tests_are() -> dict[str, set[Path]]:
    found: dict[str, set[Path]] = {}
    for file in ROOT.glob("tests/**/test_*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, set()).add(file)
    return found


def test_there_are_pages() -> None:
    assert {ALGORITHM, ROOT / "README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_to_a_file_of_the_project(page: Path) -> None:
    for _, target in links(page):
        file = target_file(page, target)
        assert file.is_relative_to(ROOT), f"{target} leads out of the project"
        assert file.exists(), f"{target} leads nowhere"
        fragment = target.partition("#")[2]
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file), f"{target}: there is no such heading"


def test_every_function_that_the_algorithm_page_names_exists() -> None:
    named = references(ALGORITHM)
    assert len(named) > 20
    assert [name for name in named if source_of(name) is None] == []


def test_every_test_that_the_algorithm_page_names_exists() -> None:
    named = set(re.findall(r"\btest_\w+\b(?!\.py)", prose(ALGORITHM)))
    assert len(named) > 20
    assert sorted(named - where_tests_are().keys()) == []


def test_links_of_the_algorithm_page_lead_to_the_file_that_defines_the_name() -> None:
    tests = where_tests_are()
    for text, target in links(ALGORITHM):
        name, file = text.strip("`"), target_file(ALGORITHM, target)
        if name.startswith("test_") and not name.endswith(".py"):
            assert file in tests[name], f"{name} is not in {target}"
        elif text.startswith("`") and file.suffix == ".py" and "/" not in name and not name.endswith(".py"):
            assert file == source_of(name), f"{name} is not in {target}"


def test_every_known_answer_that_is_proved_is_on_the_algorithm_page() -> None:
    def numbers(names: list[str]) -> set[str]:
        return {found[1] for name in names if (found := re.match(r"test_(t\d+)_", name))}

    proved = numbers(list(where_tests_are()))
    assert len(proved) > 10
    assert proved <= numbers(re.findall(r"\btest_\w+", prose(ALGORITHM)))


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page, of `mine`\n[x](gone.md#a) [y](https://a.b) `core.rules.nope`\n```\n[z](code.md)\n```\n")
    assert links(page) == [("x", "gone.md#a")]
    assert anchors(page) == {"a-page-of-mine"}
    assert references(page) == ["core.rules.nope"]
    assert source_of("core.rules.nope") is None
    assert source_of("core.kernel.Updater.nope") is None
    assert source_of("core.kernel.Updater.mix") == ROOT / "src/offbeat/core/kernel.py"
    assert source_of("offbeat.scaled_from") == ROOT / "src/offbeat/__init__.py"
