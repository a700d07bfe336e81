//! Prints the JSON Schema of the control protocol, the contents of
//! `docs/reference/control-schema.json`.

fn main() {
    println!("{:#}", control_api::schema());
}
