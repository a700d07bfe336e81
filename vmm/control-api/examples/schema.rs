//! Prints the JSON Schema of the control protocol: what `docs/reference/control-schema.json` is.

fn main() {
    println!("{:#}", control_api::schema());
}
