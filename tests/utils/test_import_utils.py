"""Classes by dotted path."""

import re
from collections import OrderedDict
from pathlib import Path

import pytest

from roll.exceptions import ConfigError
from roll.utils.import_utils import import_class, safe_import_class


def test_a_class_by_its_path() -> None:
    assert import_class("collections.OrderedDict") is OrderedDict
    assert safe_import_class("collections.OrderedDict") is OrderedDict


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "OrderedDict",
            "'OrderedDict' is not a dotted path to a class; expected 'package.module.Class'",
        ),
        (
            "collektions.OrderedDict",
            "'collektions.OrderedDict': there is no module 'collektions'; check the spelling",
        ),
        (
            "collections.ordered.Dict",
            "'collections.ordered.Dict': there is no module 'collections.ordered'",
        ),
        (
            "collections.OrderedDikt",
            "'collections.OrderedDikt': module collections has no 'OrderedDikt'",
        ),
    ],
)
def test_a_wrong_path(path: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        import_class(path)
    assert safe_import_class(path) is None
    assert message in caplog.text


def test_a_module_whose_own_import_fails_is_not_a_wrong_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\nclass Here: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        import_class("needs_more.Here")
    assert safe_import_class("needs_more.Here") is None
    assert (
        "cannot import needs_more.Here: No module named 'a_package_that_is_not_there'"
        in caplog.text
    )
