"""Write the tables of docs/devices.md from the device files: ``update_devices.py``."""

from configurations import ROOT, fill

from pimflow.hardware import PimSpec, spec_names
from pimflow.hardware.description import describe, description_markdown

PAGE = ROOT / "docs" / "devices.md"


def page_with_devices(page_text: str) -> str:
    """The page with current descriptions of PIM devices between their marks."""
    for name in spec_names("pim"):
        page_text = fill(page_text, name, description_markdown(describe(PimSpec.load(name))))
    return page_text


def main() -> None:
    PAGE.write_text(page_with_devices(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
