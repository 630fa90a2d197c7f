"""Makes a notebook and a page of every lesson, with its output and pictures in them.

    python -m lessons [--only 03] [--out FOLDER]

The lessons are the source; what this writes is never edited. Needs the extra `docs` (jupytext).
"""

import argparse
import base64
import contextlib
import io
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def run(lesson):
    """A notebook of the lesson with what each cell printed and drew."""
    import jupytext
    import nbformat

    sys.path.insert(0, str(HERE))
    import course

    notebook, names = jupytext.read(lesson), {"__name__": "__main__"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        before, said = len(course.SHOWN), io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(cell.source, str(lesson), "exec"), names)
        text = "".join(line for line in said.getvalue().splitlines(True) if not line.startswith("picture: "))
        if text:
            cell.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=text))
        for path in course.SHOWN[before:]:
            png = base64.b64encode(path.read_bytes()).decode()
            drawn = nbformat.v4.new_output("display_data", data={"image/png": png}, metadata={"name": path.name})
            cell.outputs.append(drawn)
    return notebook


def page(notebook, lesson):
    """The notebook as Markdown; its pictures lie beside it."""
    parts = [f"<!-- made from lessons/{lesson.name} by `python -m lessons`; edit that -->"]
    for cell in notebook.cells:
        if cell.cell_type != "code":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            if output.output_type == "stream":
                parts.append(f"```text\n{output.text.rstrip()}\n```")
            else:
                name = output.metadata["name"]
                parts.append(f"![{name.removesuffix('.png')[3:].replace('_', ' ')}]({name})")
    return "\n\n".join(parts) + "\n"


def as_notebook(notebook):
    """The notebook with a first cell that finds what lies beside the lessons."""
    import nbformat

    finds = nbformat.v4.new_code_cell(f"import sys\n\nsys.path.insert(0, {str(HERE)!r})  # check, course, plain_vit")
    cells = [notebook.cells[0], finds, *notebook.cells[1:]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
        cell["metadata"] = {}
        for output in cell.get("outputs", ()):
            output["metadata"] = {} if "metadata" in output else output.get("metadata")
            if output.output_type == "stream":
                del output["metadata"]
    nbformat.validate(made)
    return nbformat.writes(made)


def contents():
    """The page that lists them, which leads to the pages in place of the files."""
    return re.sub(r"\]\((\d\d_\w+)\.py\)", r"](\1.md)", (HERE / "README.md").read_text())


def main():
    parser = argparse.ArgumentParser(prog="python -m lessons", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE.parent / "out" / "lessons", help="where they go")
    parser.add_argument("--only", default="", help="lessons whose names start so, such as 03")
    arguments = parser.parse_args()
    try:
        import jupytext  # noqa: F401
    except ImportError:
        sys.exit("notebooks need jupytext: pip install -e '.[docs]'")
    sys.path.insert(0, str(HERE))
    import course

    course.OUT = arguments.out
    arguments.out.mkdir(parents=True, exist_ok=True)
    lessons = sorted(HERE.glob("[01][0-9]_*.py"))
    chosen = [lesson for lesson in lessons if lesson.stem.startswith(arguments.only)]
    if not chosen:
        sys.exit(f"no lesson starts with {arguments.only!r}; there are {', '.join(each.stem[:2] for each in lessons)}")
    for number, lesson in enumerate(chosen):
        print(f"{number + 1} of {len(chosen)}: {lesson.stem}", flush=True)
        notebook = run(lesson)
        (arguments.out / f"{lesson.stem}.md").write_text(page(notebook, lesson))
        (arguments.out / f"{lesson.stem}.ipynb").write_text(as_notebook(notebook))
    (arguments.out / "index.md").write_text(contents())
    print(f"notebooks and pages are in {arguments.out}")


if __name__ == "__main__":
    main()
