"""What every table must do, as a class of tests to inherit: each memory, and later the cache and the shards."""

from table_cases.convert import ConvertCases
from table_cases.copies import CopyCases
from table_cases.files import FileCases
from table_cases.gather import GatherCases
from table_cases.grow import GrowCases
from table_cases.planes import PlaneCases
from table_cases.scatter import ScatterCases
from table_cases.values import ValueCases


class TableContract(GatherCases, ScatterCases, PlaneCases, ValueCases, ConvertCases, FileCases, CopyCases, GrowCases):
    """Inherit it as a class ``Test...`` that overrides `make`, `from_array` and `load` (see `TableCases`)."""
