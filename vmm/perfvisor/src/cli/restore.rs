//! Options of `run` that determine the machine. A snapshot contains their values, and `run
//! --restore` parses them again, with the same validation.

use std::collections::BTreeMap;

use clap::ArgMatches;
use clap::parser::ValueSource;
use vpmu::CounterBackingPolicy;

use super::{Cli, CliCommand, CliEarlyExit, RunArgs};

/// Names of the [`RunArgs`] fields whose options determine the machine. No value is a path.
const MACHINE_OPTIONS: [&str; 15] = [
    "backing",
    "balloon",
    "cpu_signature",
    "cpus",
    "hide_uncounted",
    "lbr",
    "memory",
    "pmi_limit",
    "pmi_share",
    "pmu",
    "pmu_counters",
    "pmu_width",
    "profile",
    "rdpmc",
    "rng",
];

/// Name of the option for branch records, whose default depends on the host. A snapshot contains
/// this option only if the guest has branch records.
const BRANCH_RECORDS: &str = "lbr";

/// Name of the only machine option whose value may differ from that in the snapshot.
const BACKING: &str = "backing";

/// Names of the [`RunArgs`] fields whose options conflict with `--restore`: all [`MACHINE_OPTIONS`]
/// except the backing, and options that apply only to a new guest or cannot be used with snapshots.
pub(super) const CONFLICTS: [&str; 25] = [
    "balloon",
    "boot_protocol",
    "builtin",
    "cmdline",
    "cpu_signature",
    "cpus",
    "hide_uncounted",
    "hugepages",
    "initrd",
    "kernel",
    "lbr",
    "memory",
    "nested",
    "on_reset",
    "pmi_limit",
    "pmi_share",
    "pmu",
    "pmu_counters",
    "pmu_filter",
    "pmu_width",
    "profile",
    "rdpmc",
    "reserve_counters",
    "rng",
    "share_dir",
];

/// Error returned when the options in a snapshot are invalid.
#[derive(Debug, thiserror::Error)]
pub enum MachineOptionsError {
    /// The snapshot contains an option that does not determine the machine.
    #[error("the snapshot has the option '{0}', which this version of Perfvisor does not know")]
    Unknown(String),
    /// The value of an option in the snapshot is invalid.
    #[error("an option of the snapshot is invalid: {0}")]
    Invalid(String),
    /// `--backing kvm` is given, but KVM's own vPMU cannot continue the guest's counters.
    #[error("KVM's own vPMU cannot take over the guest's counters; use another --backing than kvm")]
    OwnPmu,
}

/// Stores the values of the options that determine the machine in `cli`, for later snapshots.
pub(super) fn keep_machine_options(cli: &mut Cli, matches: &ArgMatches) {
    let (CliCommand::Run(run), Some((_, given))) = (&mut cli.command, matches.subcommand()) else {
        return;
    };
    for id in MACHINE_OPTIONS {
        let value = given.get_raw(id).and_then(Iterator::last);
        if let Some(value) = value.and_then(|value| value.to_str()) {
            run.machine_options.insert(long_name(id), value.to_owned());
        }
    }
    if run.takes_saved_machine() && given.value_source(BACKING) == Some(ValueSource::DefaultValue) {
        run.machine_options.remove(BACKING);
    }
}

/// Returns the name of an option without leading dashes.
fn long_name(id: &str) -> String {
    id.replace('_', "-")
}

impl RunArgs {
    /// Returns whether the machine is determined by a snapshot or by a VM that moves to this
    /// process.
    pub fn takes_saved_machine(&self) -> bool {
        self.restore.is_some() || self.incoming.is_some()
    }

    /// Returns `self` with `options`, the machine options of a snapshot. The backing in `self`
    /// takes precedence over the snapshot's.
    ///
    /// # Errors
    /// Returns [`MachineOptionsError::Unknown`] for an option that does not determine the machine,
    /// [`MachineOptionsError::Invalid`] for an invalid value, and [`MachineOptionsError::OwnPmu`]
    /// if `--backing kvm` cannot continue the saved guest's counters.
    pub fn with_machine_options(
        &self,
        options: &BTreeMap<String, String>,
    ) -> Result<Self, MachineOptionsError> {
        let is_known = |name: &String| MACHINE_OPTIONS.iter().any(|id| long_name(id) == *name);
        if let Some(name) = options.keys().find(|name| !is_known(name)) {
            let name = name.chars().filter(char::is_ascii_graphic).take(40).collect();
            return Err(MachineOptionsError::Unknown(name));
        }
        let words = ["perfvisor", "run"].map(str::to_owned).into_iter();
        let words = words.chain(options.iter().map(|(name, value)| format!("--{name}={value}")));
        let parsed = match super::parse(words) {
            Ok(Cli {
                command: CliCommand::Run(run),
                ..
            }) => *run,
            Ok(_) => return Err(MachineOptionsError::Invalid("not of run".to_owned())),
            Err(CliEarlyExit::Error(line) | CliEarlyExit::Text(line)) => {
                return Err(MachineOptionsError::Invalid(line));
            }
        };
        let mut machine_options = options.clone();
        let backing = match self.machine_options.get(BACKING) {
            None => parsed.backing,
            Some(_) if self.backing == CounterBackingPolicy::Kvm => return Err(MachineOptionsError::OwnPmu),
            Some(own) => {
                machine_options.insert(BACKING.to_owned(), own.clone());
                self.backing
            }
        };
        Ok(Self {
            backing,
            balloon: parsed.balloon,
            cpu_signature: parsed.cpu_signature,
            cpus: parsed.cpus,
            hide_uncounted: parsed.hide_uncounted,
            // A snapshot without the option is that of a guest without branch records.
            lbr: Some(parsed.lbr.unwrap_or(false)),
            memory: parsed.memory,
            pmi_limit: parsed.pmi_limit,
            pmi_share: parsed.pmi_share,
            pmu: parsed.pmu,
            pmu_counters: parsed.pmu_counters,
            pmu_width: parsed.pmu_width,
            profile: parsed.profile,
            rdpmc: parsed.rdpmc,
            rng: parsed.rng,
            machine_options,
            ..self.clone()
        })
    }
}

/// Returns the machine options to store in a snapshot. Includes `--lbr on` if the guest has branch
/// records, and no `--lbr` otherwise.
pub fn options_of_guest(args: &RunArgs, has_branch_records: bool) -> BTreeMap<String, String> {
    let mut options = args.machine_options.clone();
    if has_branch_records {
        options.insert(BRANCH_RECORDS.to_owned(), "on".to_owned());
    } else {
        options.remove(BRANCH_RECORDS);
    }
    options
}

/// Returns the backing (the source of the counts) in the valid machine options of a snapshot.
pub fn saved_backing(options: &BTreeMap<String, String>) -> CounterBackingPolicy {
    let saved = options.get(BACKING).and_then(|name| name.parse().ok());
    saved.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(words: &str) -> Result<RunArgs, String> {
        let words = ["perfvisor", "run"].into_iter().chain(words.split_whitespace());
        match super::super::parse(words) {
            Ok(Cli {
                command: CliCommand::Run(run),
                ..
            }) => Ok(*run),
            Ok(_) => panic!("not run"),
            Err(CliEarlyExit::Error(line) | CliEarlyExit::Text(line)) => Err(line),
        }
    }

    #[test]
    fn machine_options_survive_a_snapshot() {
        let given = "--cpus 2,max=4 --memory 64M --pmu amd --pmu-counters 4 --rdpmc trap --rng off \
            --pmi-limit 99 --pmi-share 20% --balloon size=8,stats=2";
        let first = run(given).unwrap();
        assert_eq!(first.machine_options["memory"], "64M");
        let restored = run("--restore d --name x").unwrap();
        let restored = restored.with_machine_options(&first.machine_options).unwrap();
        assert_eq!(restored.cpus, first.cpus);
        assert_eq!(restored.memory, 64 << 20);
        assert_eq!(restored.pmu, first.pmu);
        assert_eq!(restored.pmu_counters, first.pmu_counters);
        assert_eq!((restored.rdpmc, restored.rng), (first.rdpmc, false));
        assert_eq!(restored.pmi_limit, Some(99));
        assert_eq!(restored.balloon, first.balloon);
        assert!(first.balloon.is_some_and(|balloon| balloon.size_mib == 8));
        assert_eq!(restored.pmi_share, first.pmi_share);
        assert!(first.pmi_share.is_some());
        assert_eq!(restored.machine_options, first.machine_options);
        assert_eq!(restored.name.as_deref(), Some("x"));
    }

    /// A restored guest has branch records if and only if its snapshot has them, independently of
    /// the host's default for `--lbr`.
    #[test]
    fn branch_records_follow_the_snapshot() {
        for (given, has, expected) in [
            ("", true, true),
            ("", false, false),
            ("--lbr off", false, false),
            ("--lbr on", true, true),
        ] {
            let options = options_of_guest(&run(given).unwrap(), has);
            assert_eq!(options.contains_key("lbr"), has);
            let restored = run("--restore d")
                .unwrap()
                .with_machine_options(&options)
                .unwrap();
            assert_eq!(restored.lbr, Some(expected), "{given}");
        }
        assert!(run("--restore d --lbr off").is_err());
    }

    #[test]
    fn backing_of_the_command_line_replaces_that_of_the_snapshot() {
        let saved = run("--backing clock").unwrap().machine_options;
        assert_eq!(saved_backing(&saved), CounterBackingPolicy::Clock);
        let restored = |words| run(words).unwrap().with_machine_options(&saved);
        assert_eq!(
            restored("--restore d").unwrap().backing,
            CounterBackingPolicy::Clock
        );
        let exact = restored("--restore d --backing exact").unwrap();
        assert_eq!(exact.backing, CounterBackingPolicy::Exact);
        // A further snapshot of the restored VM stores the new backing.
        assert_eq!(saved_backing(&exact.machine_options), CounterBackingPolicy::Exact);
        let refused = restored("--restore d --backing kvm");
        assert!(matches!(refused, Err(MachineOptionsError::OwnPmu)));
        assert!(run("--restore-loses").is_err());
    }

    /// The options in a snapshot cannot name files or change how the VM is operated.
    #[test]
    fn snapshot_cannot_set_other_options() {
        let args = run("--restore d").unwrap();
        for name in ["kernel", "disk", "seccomp", "log-file", "restore", "x\ny"] {
            let options = BTreeMap::from([(name.to_owned(), "off".to_owned())]);
            let refused = args.with_machine_options(&options);
            assert!(matches!(refused, Err(MachineOptionsError::Unknown(_))), "{name}");
        }
        let options = BTreeMap::from([("memory".to_owned(), "1".to_owned())]);
        let line = args.with_machine_options(&options).unwrap_err().to_string();
        assert!(
            line.starts_with("an option of the snapshot is invalid: "),
            "{line}"
        );
        assert!(!line.contains('\n'));
    }

    #[test]
    fn options_of_the_machine_conflict_with_restore() {
        for given in [
            "--memory 64M",
            "--kernel k",
            "--pmu amd",
            "--on-reset restart",
            "--share-dir d",
            "--hugepages 2M",
        ] {
            let line = run(&format!("--restore d {given}")).unwrap_err();
            assert!(line.contains("cannot be used with"), "{given}: {line}");
        }
        assert!(run("--restore-verify").is_err());
        assert!(run("--clone").is_err());
        run("--restore d --restore-verify --disk a --net tap=t --console none --seccomp log").unwrap();
    }
}
