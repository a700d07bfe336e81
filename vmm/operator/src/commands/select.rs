//! Selects VMs by the process ID or the control group of their VMM process instead of by name.

use std::fs;
use std::path::{Path, PathBuf};

use super::OperatorCommandError;
use super::ps::{self, VmSocket};
use control_api::client::{Client, ClientError, REPLY_TIMEOUT};

/// Prefix of a process ID in place of a VM's name. A name cannot contain a colon.
const PID_PREFIX: &str = "pid:";

/// Returns `pid:PID` if a process ID is given, and otherwise the VM's name.
pub(super) fn name_or_pid(name: Option<&str>, pid: Option<u32>) -> Option<String> {
    let by_pid = pid.map(|pid| format!("{PID_PREFIX}{pid}"));
    by_pid.or_else(|| name.map(str::to_owned))
}

/// Returns the process ID if `name` has the form `pid:PID`.
pub(super) fn pid_of_name(name: &str) -> Option<u32> {
    name.strip_prefix(PID_PREFIX)?.parse().ok()
}

/// Connects to the VM that runs in process `pid`.
///
/// # Errors
/// Returns [`ClientError::NoSuchVm`] if no VM that this user can reach runs in the process.
pub(super) fn connect_by_pid(pid: u32) -> Result<Client, ClientError> {
    let found = reachable_vms();
    let client = found.iter().find_map(|vm| {
        let client = Client::connect_at(&vm.path, vm.owner, REPLY_TIMEOUT).ok()?;
        (client.info().pid == pid).then_some(client)
    });
    client.ok_or_else(|| ClientError::NoSuchVm {
        name: format!("{PID_PREFIX}{pid}"),
        others: found.into_iter().map(|vm| vm.name).collect(),
    })
}

/// Returns the VMs with a socket in this user's default directory, followed by the VMs in all other
/// socket directories.
fn reachable_vms() -> Vec<VmSocket> {
    let mut found = ps::in_default_directory().unwrap_or_default();
    for vm in ps::everywhere_quietly() {
        if !found.iter().any(|known| known.path == vm.path) {
            found.push(vm);
        }
    }
    found
}

/// A control group, as given by `--cgroup`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ControlGroup(String);

impl ControlGroup {
    /// Parses the path of a group below the root of the cgroup hierarchy, or the path of the
    /// group's directory.
    ///
    /// # Errors
    /// Returns [`OperatorCommandError::NoCgroup`] if there is no such group.
    pub(super) fn parse(text: &str) -> Result<Self, OperatorCommandError> {
        Self::below(Path::new("/sys/fs/cgroup"), text)
    }

    fn below(root: &Path, text: &str) -> Result<Self, OperatorCommandError> {
        let inside = Path::new(text).strip_prefix(root).unwrap_or(Path::new(text));
        let inside = inside.strip_prefix("/").unwrap_or(inside);
        let hybrid: PathBuf = root.join("unified");
        if ![root, &hybrid].iter().any(|root| root.join(inside).is_dir()) {
            return Err(OperatorCommandError::NoCgroup(text.to_owned()));
        }
        let inside = inside.to_string_lossy();
        Ok(Self(format!("/{}", inside.trim_end_matches('/'))))
    }

    /// Returns whether the process `pid` is in this group or in a descendant.
    pub(super) fn contains(&self, pid: u32) -> bool {
        fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|groups| self.is_in(&groups))
    }

    /// Returns whether `groups`, the contents of `/proc/PID/cgroup`, lists this group or a
    /// descendant (cgroups(7)).
    fn is_in(&self, groups: &str) -> bool {
        groups.lines().any(|line| {
            // hierarchy-ID:controllers:path
            let path = line.splitn(3, ':').nth(2).unwrap_or_default();
            let rest = path.strip_prefix(self.0.trim_end_matches('/'));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_id_replaces_name() {
        assert_eq!(name_or_pid(None, Some(7)).as_deref(), Some("pid:7"));
        assert_eq!(name_or_pid(Some("web"), None).as_deref(), Some("web"));
        assert_eq!(pid_of_name("pid:7"), Some(7));
        for name in ["web", "7", "pid:", "pid:x", "pid:-1"] {
            assert_eq!(pid_of_name(name), None, "{name}");
        }
    }

    #[test]
    fn cgroup_contains_its_children() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("vms/web")).unwrap();
        let group = |text: &str| ControlGroup::below(root.path(), text).unwrap();
        let vms = group("/vms");
        assert_eq!(group("vms/"), vms);
        assert_eq!(group(root.path().join("vms").to_str().unwrap()), vms);
        for (line, inside) in [
            ("0::/vms", true),
            ("0::/vms/web", true),
            ("4:cpu,cpuacct:/vms/web", true),
            ("0::/vms2", false),
            ("0::/", false),
            ("", false),
        ] {
            assert_eq!(vms.is_in(line), inside, "{line}");
        }
        assert!(group("/").is_in("0::/anything"));
        let missing = ControlGroup::below(root.path(), "none").unwrap_err();
        assert!(missing.to_string().contains("none"));
    }
}
