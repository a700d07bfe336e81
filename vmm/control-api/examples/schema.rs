//! Prints the JSON Schema of the control protocol, which `docs/reference/control-schema.json`
//! contains.

fn main() {
    println!("{:#}", control_api::schema());
}
