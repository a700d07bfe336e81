//! Counts events of a running VM for a second and prints the counts.
//!
//! Usage: `cargo run -p operator --example count [NAME [EVENTS]]`, for example `cargo run -p
//! operator --example count web cycles,instructions`.

use std::error::Error;
use std::time::Duration;

use operator::session::{CountingSession, connect};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let name = args.next();
    let events = args.next().unwrap_or_else(|| "task-clock,kvm:exits".to_owned());
    let vm = connect(name.as_deref())?;
    println!("{}, {} vCPUs:", vm.info().name, vm.info().vcpus);
    let mut session = CountingSession::start(vm, &events)?;
    std::thread::sleep(Duration::from_secs(1));
    for count in session.read()? {
        match (count.value, count.unsupported) {
            (Some(value), _) => println!("{value:>16}  {}", count.event),
            (None, Some(why)) => println!("{:>16}  {}: {why}", "<not supported>", count.event),
            (None, None) => println!("{:>16}  {}", "<not counted>", count.event),
        }
    }
    Ok(())
}
