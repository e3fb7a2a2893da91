"""Faults of the assembler are found in what ``cuobjdump`` prints."""

from __future__ import annotations

from kestrel_kernels_cuda.assembly import unset_registers


def listing(*instructions: str) -> str:
    """The instructions at addresses 0x0000, 0x0010, ..., as ``cuobjdump -sass`` prints them."""
    return "\n".join(
        f"        /*{16 * i:04x}*/    {text} ;   /* 0x0 */" for i, text in enumerate(instructions)
    )


def test_a_register_that_nothing_writes_is_named_with_its_reader() -> None:
    sass = listing("ULDC.64 UR4, c[0x0][0x208]", "UIADD3 UR22, UP0, UR13, 0x40, URZ", "EXIT")
    assert unset_registers(sass) == {"UR13": "0010 UIADD3 UR22, UP0, UR13, 0x40, URZ"}


def test_a_product_reads_where_its_operands_lie() -> None:
    both = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspB, R24"
    right = "HGMMA.64x32x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24"
    assert unset_registers(listing("ULDC.64 UR10, c[0x0][0x208]", right)) == {}
    assert set(unset_registers(listing("ULDC.64 UR10, c[0x0][0x208]", both))) == {"UR8", "UR9"}


def test_a_write_on_any_path_counts() -> None:
    skipped = listing("@P0 BRA 0x20", "UMOV UR4, 0x1", "USHF.L.U32 UR5, UR4, 0x1, URZ", "EXIT")
    assert unset_registers(skipped) == {}
    never = listing("BRA 0x20", "UMOV UR4, 0x1", "USHF.L.U32 UR5, UR4, 0x1, URZ", "EXIT")
    assert set(unset_registers(never)) == {"UR4"}


def test_a_write_behind_the_read_counts_in_a_loop_alone() -> None:
    loop = ("R2UR UR5, R0", "USHF.L.U32 UR6, UR4, 0x1, URZ", "UMOV UR4, UR5")
    assert unset_registers(listing(*loop, "@P0 BRA 0x10", "EXIT")) == {}
    assert set(unset_registers(listing(*loop, "EXIT"))) == {"UR4"}
