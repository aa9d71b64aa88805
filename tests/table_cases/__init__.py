"""The cases of the table contract by subject; tests inherit all of them from `table_contract.TableContract`."""
