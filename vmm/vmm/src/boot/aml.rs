//! Serialises AML objects of the crate acpi_tables.

use acpi_tables::{Aml, AmlSink};

struct Bytes(Vec<u8>);

impl AmlSink for Bytes {
    fn byte(&mut self, byte: u8) {
        self.0.push(byte);
    }

    fn vec(&mut self, v: &[u8]) {
        self.0.extend_from_slice(v);
    }
}

/// Returns the AML encoding of `table`, which is a whole table or an object within one.
pub(super) fn bytes_of(table: &dyn Aml) -> Vec<u8> {
    let mut sink = Bytes(Vec::new());
    table.to_aml_bytes(&mut sink);
    sink.0
}
