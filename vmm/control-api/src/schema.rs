//! Generates the JSON Schema of the protocol for clients in other languages, from the types that
//! the server and the client in this crate use.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::protocol::{PROTOCOL, ReplyLine, RequestLine};
use crate::request;

/// Returns the JSON Schema 2020-12 of the protocol.
///
/// The property `request` describes one line from the client, and `reply` one line from the server.
/// `results` maps the name of each call to the type of `ok` in the reply to the call. `$defs`
/// contains the types.
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

/// Converts the type name of a request to the name of its call, for example `GuestView` to
/// `guest_view`.
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
