"""Plans as people edit them: by the fields of their files."""

from dataclasses import replace

from pimflow.core.plan import Choice, Plan


def edited(choice: Choice, **changes: object) -> Choice:
    """A choice with other fields in its file."""
    return Choice.from_table(choice.to_table() | changes)


def edited_plan(plan: Plan, region: str, **changes: object) -> Plan:
    """A plan in which the choice of one region has other fields in its file."""
    choices = (edited(c, **changes) if c.region == region else c for c in plan.choices)
    return replace(plan, choices=tuple(choices))
