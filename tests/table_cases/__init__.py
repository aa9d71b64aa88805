"""What every table must do, as a class of tests to inherit: `TableContract`, and its parts by subject."""

from table_cases.files import FileCases, GrowCases
from table_cases.gather import GatherCases
from table_cases.scatter import ConvertCases, ScatterCases
from table_cases.values import CopyCases, PlaneCases, ValueCases


class TableContract(GatherCases, ScatterCases, PlaneCases, ValueCases, ConvertCases, FileCases, CopyCases, GrowCases):
    """Inherit it as a class ``Test...`` that overrides `make`, `from_array` and `load` (see `TableCases`)."""
