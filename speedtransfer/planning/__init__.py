"""Will a table fit, where, and how fast: computed for any machine, measured on this one."""
