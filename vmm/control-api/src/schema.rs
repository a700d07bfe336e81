//! The protocol as a JSON Schema, for clients in other languages. It is made from the types that the server
//! and our own client use, so it cannot say anything else than they do.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::protocol::{PROTOCOL, ReplyLine, RequestLine};
use crate::request;

/// The schema of the protocol, JSON Schema 2020-12. `request` and `reply` are a line in each direction, and
/// `results` tells by the name of a call what `ok` of its reply is. The types are in `$defs`.
pub fn schema() -> Value {
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let request = generator.subschema_for::<RequestLine>();
    let reply = generator.subschema_for::<ReplyLine>();
    let results: Map<String, Value> = request::replies(&mut generator)
        .into_iter()
        .map(|(name, schema)| (snake_case(name), schema.to_value()))
        .collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": format!("Perfvisor's control protocol, version {PROTOCOL}"),
        "properties": { "request": request, "reply": reply },
        "results": results,
        "$defs": generator.take_definitions(true),
    })
}

/// The name of a call from that of its type: `GuestView` is `guest_view`.
fn snake_case(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.extend(c.to_lowercase());
    }
    out
}
