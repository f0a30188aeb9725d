"""Write the tables of docs/devices.md from the device files: ``update_devices.py``."""

from pathlib import Path

from pimflow.hardware import description

PAGE = Path(__file__).parent.parent / "docs" / "devices.md"


def main() -> None:
    PAGE.write_text(description.update_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
