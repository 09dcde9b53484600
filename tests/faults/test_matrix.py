"""The matrix of `make test-faults` has every cell; its runs are too long for `make test`."""

from itertools import product

from tests.faults.matrix.cells import (
    ACTIVITIES,
    DISK_CELLS,
    DISK_FAULTS,
    LINK_CELLS,
    LINK_FAULTS,
    LINKS,
    SERVICE_CELLS,
    SERVICE_FAULTS,
    SERVICES,
    Cell,
)


def test_the_matrix_has_every_cell_once() -> None:
    cells = [*SERVICE_CELLS, *DISK_CELLS, *LINK_CELLS]
    assert len(cells) == len(set(cells)) == 4 * 3 * 6 + 5 + 4 * 5
    assert set(SERVICE_CELLS) == {Cell(*each) for each in product(SERVICES, SERVICE_FAULTS, ACTIVITIES)}
    assert {(cell.part, cell.fault) for cell in LINK_CELLS} == set(product(LINKS, LINK_FAULTS))
    assert [cell.fault for cell in DISK_CELLS] == list(DISK_FAULTS)
