"""What README shows: the first example with its output, and a figure that is as old as the table."""

import json
import re
from pathlib import Path

import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_first_example_prints_what_stands_below_it(capsys):
    torch.manual_seed(0)
    (code,) = re.findall(r"^````python\n(.*?)^````$", README, re.DOTALL | re.MULTILINE)
    (output,) = re.findall(r"^````text\n(.*?)^````$", README, re.DOTALL | re.MULTILINE)
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == output


def test_table_and_figure_are_of_one_run():
    section = README.split("<!-- summary -->")[1].split("<!-- end -->")[0]
    (stamp,) = re.findall(r"<!-- ([0-9a-f]{12}) -->", section)
    (figure,) = re.findall(r"!\[.*?\]\((.*?)\)", section)
    assert Image.open(ROOT / figure).text["stamp"] == stamp


def test_the_page_shows_the_comparison_of_the_table():
    page = json.loads((ROOT / "selfspec" / "page" / "embedded.json").read_text())
    (shown,) = (each for each in page["comparisons"] if (each["name"], each["target"]) == ("readme", "qwen-coder"))
    section = README.split("<!-- summary -->")[1].split("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")]
    heads, rows = lines[0], {line[0]: line for line in lines[2:]}
    for row in shown["rows"]:
        if row["arm"] != "plain":
            cell, figures = rows[row["arm"]][heads.index(f"HumanEval, T={row['T']:g}")], row["groups"]["HumanEval"]
            assert cell.replace("**", "").startswith(f"{figures['speedup']['ratio']:.2f}x [")
            assert cell.endswith(f"τ {figures['tau']:.2f}")
    assert rows.keys() == {row["arm"] for row in shown["rows"]} - {"plain"}


def test_prose_fits_on_a_line():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            code ^= line.startswith("```")
            assert code or line.startswith(("|", "    ")) or len(line) <= 120, f"{page.name}, line {number}"
