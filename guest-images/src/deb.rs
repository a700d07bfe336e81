//! Debian packages: queries candidate versions, downloads and unpacks packages.
//!
//! Uses apt and dpkg, so the machine's sources, keys and proxies apply. Packages are downloaded to
//! a cache directory and unpacked below it, but not installed. Queries for backports use separate
//! package lists, so the machine's sources do not change.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

use crate::progress::ProgressLog;

/// Error returned when a Debian package cannot be queried, fetched or unpacked.
#[derive(Debug, thiserror::Error)]
pub enum DebError {
    /// apt or dpkg is not installed.
    #[error("cannot run {program}: is this a Debian system?")]
    NoTool {
        /// Name of the program, apt or dpkg, that could not be started.
        program: &'static str,
        /// Error returned when the program was started.
        #[source]
        source: io::Error,
    },
    /// The configured sources do not offer the package.
    #[error("package {0} not found in the configured apt sources; run `sudo apt-get update`")]
    NotOffered(String),
    /// The machine's Debian release has no backports, or apt is configured for another release.
    #[error("backports unavailable: {0}")]
    NoBackports(String),
    /// apt-get or dpkg-deb failed.
    #[error("{command} failed: {message}")]
    Failed {
        /// Command line of the failed program.
        command: String,
        /// Last line that the program wrote to standard error.
        message: String,
    },
    /// A file in the cache could not be read or written.
    #[error("{path}")]
    Io {
        /// Path of the file that could not be read or written.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
}

/// The Debian archive that apt is configured for, with a cache of downloaded packages.
///
/// Each apt command reads the whole package list, which takes about a second on a slow machine.
/// Queries and downloads are therefore batched, and results are cached.
pub struct DebianArchive<'a> {
    cache: PathBuf,
    /// Command-line options that every apt command of this archive needs.
    options: Vec<OsString>,
    progress: &'a ProgressLog,
    /// Control records of candidate versions, or `None` for names that the sources do not offer.
    records: BTreeMap<String, Option<Record>>,
    /// Versions of all packages that have been fetched, by package name.
    versions: BTreeMap<String, String>,
    lists_updated: bool,
}

/// Fields of a Debian package's control record.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Record {
    version: String,
    size_bytes: u64,
    depends: BTreeSet<String>,
}

impl<'a> DebianArchive<'a> {
    /// Creates an archive with the machine's apt configuration. Packages are downloaded to `cache`,
    /// which is created if it does not exist.
    pub fn new(cache: &Path, progress: &'a ProgressLog) -> Result<Self, DebError> {
        fs::create_dir_all(cache).map_err(|source| DebError::Io {
            path: cache.to_owned(),
            source,
        })?;
        Ok(Self {
            cache: cache.to_owned(),
            options: Vec::new(),
            progress,
            records: BTreeMap::new(),
            versions: BTreeMap::new(),
            lists_updated: false,
        })
    }

    /// Creates an archive for the backports of the machine's Debian release. Uses the mirror
    /// configured in apt, and stores apt's state in `lists`. An unreachable mirror is only detected
    /// by the first query.
    pub fn backports(cache: &Path, lists: &Path, progress: &'a ProgressLog) -> Result<Self, DebError> {
        Self::suite(cache, lists, progress, |codename| format!("{codename}-backports"))
    }

    /// Creates an archive for a Debian suite such as `trixie`, which may differ from the machine's
    /// release. Uses the mirror configured in apt.
    pub fn of_suite(
        cache: &Path,
        lists: &Path,
        suite: &str,
        progress: &'a ProgressLog,
    ) -> Result<Self, DebError> {
        Self::suite(cache, lists, progress, |_| suite.to_owned())
    }

    /// Creates an archive for a Debian suite. The function `name` receives the codename of the
    /// machine's release and returns the name of the suite.
    fn suite(
        cache: &Path,
        lists: &Path,
        progress: &'a ProgressLog,
        name: impl FnOnce(&str) -> String,
    ) -> Result<Self, DebError> {
        let mut archive = Self::new(cache, progress)?;
        let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
        let codename = codename(&release)
            .ok_or_else(|| DebError::NoBackports("this is not a release of Debian".to_owned()))?;
        let mut targets = archive.index_targets()?;
        // On a fresh machine apt has no package lists.
        if mirror(&targets, codename).is_none() && archive.update_lists() {
            targets = archive.index_targets()?;
        }
        let mirror = mirror(&targets, codename)
            .ok_or_else(|| DebError::NoBackports(format!("the apt sources have no main of {codename}")))?;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| DebError::Io { path, source }
        };
        // apt requires absolute paths and does not create directories.
        let state = lists.join("lists");
        fs::create_dir_all(state.join("partial")).map_err(io(&state))?;
        let lists = fs::canonicalize(lists).map_err(io(lists))?;
        let sources = lists.join("sources.list");
        fs::write(&sources, format!("deb {mirror} {} main\n", name(codename))).map_err(io(&sources))?;
        let set = |name: &str, value: &Path| {
            let mut option = OsString::from(format!("-o{name}="));
            option.push(value);
            option
        };
        archive.options = vec![
            set("Dir::Etc::SourceList", &sources),
            set("Dir::Etc::SourceParts", Path::new("-")),
            set("Dir::State::Lists", &lists.join("lists")),
            set("Dir::Cache", &lists),
            // Installed packages are not candidates.
            set("Dir::State::status", Path::new("/dev/null")),
            set("APT::Sandbox::User", Path::new("root")),
        ];
        // No other program refreshes these lists. Without a network connection the previous lists
        // are used.
        archive.lists_updated = false;
        archive.update_lists();
        Ok(archive)
    }

    /// Returns the codename, component and address of each package index in apt's configuration,
    /// one index per line.
    fn index_targets(&self) -> Result<String, DebError> {
        let fields = "$(CODENAME) $(COMPONENT) $(REPO_URI)";
        run(
            self.apt("apt-get")
                .args(["indextargets", "--format", fields, "Created-By: Packages"]),
            "apt-get",
        )
    }

    /// Creates an apt command for this archive.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.options);
        command
    }

    /// Returns the versions of all packages fetched so far, by package name.
    pub fn versions(&self) -> &BTreeMap<String, String> {
        &self.versions
    }

    /// Returns the names in `packages` that the configured sources offer as real, not virtual,
    /// packages.
    pub fn offered(&mut self, packages: Vec<String>) -> Result<Vec<String>, DebError> {
        self.look_up(packages.iter().map(String::as_str))?;
        Ok(packages
            .into_iter()
            .filter(|name| self.record(name).is_ok())
            .collect())
    }

    /// Returns the names of the packages that the candidate versions of `packages` depend on,
    /// including alternatives, without versions and architectures.
    pub fn dependencies<'n>(
        &mut self,
        packages: impl IntoIterator<Item = &'n str>,
    ) -> Result<BTreeSet<String>, DebError> {
        let packages: Vec<_> = packages.into_iter().collect();
        self.look_up(packages.iter().copied())?;
        let mut found = BTreeSet::new();
        for package in packages {
            found.extend(self.record(package)?.depends.iter().cloned());
        }
        Ok(found)
    }

    /// Returns the names of all packages in the configured sources that start with `prefix`.
    pub fn names(&mut self, prefix: &str) -> Result<Vec<String>, DebError> {
        let ask = |archive: &Self| run(archive.apt("apt-cache").args(["pkgnames", prefix]), "apt-cache");
        let mut list = ask(self)?;
        if list.is_empty() && self.update_lists() {
            list = ask(self)?;
        }
        Ok(list.lines().map(str::to_owned).collect())
    }

    /// Downloads the candidate versions of `packages` that are not cached, and returns the paths of
    /// the .deb files in the same order.
    pub fn fetch(&mut self, packages: &[&str]) -> Result<Vec<PathBuf>, DebError> {
        self.look_up(packages.iter().copied())?;
        let mut missing = Vec::new();
        for package in packages {
            let record = self.record(package)?;
            if self.cached(package, &record.version).is_none() {
                let megabytes = record.size_bytes as f64 / 1e6;
                self.progress.step(&format!(
                    "fetching {package} {} ({megabytes:.1} MB)",
                    record.version
                ));
                missing.push(*package);
            }
        }
        if !missing.is_empty()
            && let Err(error) = self.download(&missing)
        {
            // The lists may be outdated. Refresh them once and retry.
            return if self.update_lists() {
                self.fetch(packages)
            } else {
                Err(error)
            };
        }
        let mut debs = Vec::new();
        for package in packages {
            let version = self.record(package)?.version.clone();
            let deb = self.cached(package, &version).ok_or_else(|| DebError::Failed {
                command: format!("apt-get download {package}"),
                message: format!("version {version} did not arrive in {}", self.cache.display()),
            })?;
            debs.push(deb);
            self.versions.insert((*package).to_owned(), version);
        }
        Ok(debs)
    }

    fn record(&self, package: &str) -> Result<&Record, DebError> {
        match self.records.get(package) {
            Some(Some(record)) => Ok(record),
            _ => Err(DebError::NotOffered(package.to_owned())),
        }
    }

    /// Reads the control records of `packages` that `records` does not contain yet.
    fn look_up<'n>(&mut self, packages: impl IntoIterator<Item = &'n str>) -> Result<(), DebError> {
        let unknown: Vec<_> = packages
            .into_iter()
            .filter(|name| !self.records.contains_key(*name))
            .collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let mut found = self.show(&unknown)?;
        // On a fresh machine apt has no package lists.
        if found.is_empty() && self.update_lists() {
            found = self.show(&unknown)?;
        }
        for name in unknown {
            self.records.insert(name.to_owned(), found.remove(name));
        }
        Ok(())
    }

    /// Unpacks a .deb file into `root`.
    pub fn unpack(&self, deb: &Path, root: &Path) -> Result<(), DebError> {
        fs::create_dir_all(root).map_err(|source| DebError::Io {
            path: root.to_owned(),
            source,
        })?;
        run(Command::new("dpkg-deb").arg("-x").arg(deb).arg(root), "dpkg-deb").map(drop)
    }

    fn cached(&self, package: &str, version: &str) -> Option<PathBuf> {
        // apt encodes the colon of a version as %3a in file names.
        let start = format!("{package}_{}_", version.replace(':', "%3a"));
        fs::read_dir(&self.cache)
            .ok()?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| {
                path.file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(|name| name.starts_with(&start) && name.ends_with(".deb"))
            })
    }

    fn download(&self, packages: &[&str]) -> Result<(), DebError> {
        let (cache, before) = (self.cache.clone(), size_of_files(&self.cache));
        let _ticker = self.progress.tick_with(move || {
            let fetched = size_of_files(&cache).saturating_sub(before);
            format!("fetched {:.0} MB so far", fetched as f64 / 1e6)
        });
        let mut command = self.apt("apt-get");
        // Without this option, apt warns that its own user cannot write to the cache.
        command
            .args(["download", "-qq", "-o", "APT::Sandbox::User=root"])
            .args(packages)
            .current_dir(&self.cache);
        run(&mut command, "apt-get").map(drop)
    }

    /// Refreshes apt's package lists at most once. Refreshing the machine's own lists requires
    /// root. Returns whether the lists were refreshed.
    fn update_lists(&mut self) -> bool {
        if std::mem::replace(&mut self.lists_updated, true) {
            return false;
        }
        let _ticker = self.progress.begin("apt-get update");
        self.records.clear();
        run(self.apt("apt-get").args(["update", "-qq"]), "apt-get").is_ok()
    }

    /// Runs `apt-cache show` and returns the control records of the candidate versions of
    /// `packages`. Packages that do not exist are omitted.
    fn show(&self, packages: &[&str]) -> Result<BTreeMap<String, Record>, DebError> {
        let mut command = self.apt("apt-cache");
        command.args(["show", "--no-all-versions"]).args(packages);
        match run(&mut command, "apt-cache") {
            // apt reports this error if none of the packages exists.
            Err(DebError::Failed { .. }) => Ok(BTreeMap::new()),
            Err(error) => Err(error),
            Ok(text) => Ok(parse_records(&text)),
        }
    }
}

/// Returns the release codename from an os-release file of Debian. Returns `None` for Debian
/// derivatives, to which Debian's backports do not apply.
fn codename(os_release: &str) -> Option<&str> {
    let value = |key: &str| {
        os_release
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches('"'))
    };
    value("VERSION_CODENAME").filter(|name| value("ID") == Some("debian") && !name.is_empty())
}

/// Returns the address of the mirror from which apt fetches the component `main` of the release
/// `codename`. Each line of `targets` contains a codename, a component and an address.
fn mirror<'t>(targets: &'t str, codename: &str) -> Option<&'t str> {
    targets.lines().find_map(|line| {
        let mut words = line.split(' ');
        (words.next() == Some(codename) && words.next() == Some("main"))
            .then(|| words.next())
            .flatten()
    })
}

/// Parses control records separated by blank lines.
fn parse_records(text: &str) -> BTreeMap<String, Record> {
    let mut records = BTreeMap::new();
    for paragraph in text.split("\n\n") {
        let mut name = None;
        let mut record = Record::default();
        for line in paragraph.lines() {
            // Continuation lines start with a space and belong to unused fields.
            let Some((field, value)) = line.split_once(": ") else {
                continue;
            };
            match field {
                "Package" => name = Some(value.to_owned()),
                "Version" => record.version = value.to_owned(),
                "Size" => record.size_bytes = value.parse().unwrap_or(0),
                "Depends" | "Pre-Depends" => record.depends.extend(
                    value
                        .split([',', '|'])
                        .filter_map(|item| item.trim().split([' ', '(', ':']).next())
                        .filter(|name| !name.is_empty())
                        .map(str::to_owned),
                ),
                _ => {}
            }
        }
        if let Some(name) = name {
            records.entry(name).or_insert(record);
        }
    }
    records
}

/// Returns the total size of the files in a directory, in bytes.
fn size_of_files(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

/// Runs a command and returns its output.
fn run(command: &mut Command, program: &'static str) -> Result<String, DebError> {
    command
        .env("LC_ALL", "C")
        .env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(std::process::Stdio::null());
    let output = command
        .output()
        .map_err(|source| DebError::NoTool { program, source })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(DebError::Failed {
        command: words.join(" "),
        message: stderr.lines().last().unwrap_or("no message").to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependencies_drop_versions_and_keep_alternatives() {
        let records = parse_records(
            "Package: tool\nVersion: 1:2.0-3\nSize: 1234\nPre-Depends: libc6 (>= 2.36)\n\
             Depends: python3:any, a | b (<< 4)\nDescription: text\n Depends: no\n\n\
             Package: other\nVersion: 7\n",
        );
        let tool = &records["tool"];
        assert_eq!(tool.version, "1:2.0-3");
        assert_eq!(tool.size_bytes, 1234);
        let depends: Vec<_> = tool.depends.iter().map(String::as_str).collect();
        assert_eq!(depends, ["a", "b", "libc6", "python3"]);
        assert_eq!(records["other"].version, "7");
    }

    #[test]
    fn backports_use_the_configured_debian_mirror() {
        let debian = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nID=debian\nVERSION_CODENAME=bookworm\n";
        assert_eq!(codename(debian), Some("bookworm"));
        assert_eq!(
            codename("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n"),
            None
        );
        assert_eq!(codename("ID=debian\n"), None);
        let targets = "bookworm-security main http://a.example/security/\nbookworm contrib http://a.example/x/\n\
                       bookworm main http://a.example/debian/\n";
        assert_eq!(mirror(targets, "bookworm"), Some("http://a.example/debian/"));
        assert_eq!(mirror(targets, "trixie"), None);
    }

    #[test]
    fn cache_is_searched_by_exact_version() {
        let dir = tempfile::tempdir().unwrap();
        let progress = ProgressLog::quiet();
        let archive = DebianArchive::new(dir.path(), &progress).unwrap();
        fs::write(dir.path().join("tool_1%3a2.0-3_amd64.deb"), "x").unwrap();
        assert!(archive.cached("tool", "1:2.0-3").is_some());
        assert!(archive.cached("tool", "1:2.0").is_none());
        assert!(archive.cached("too", "1:2.0-3").is_none());
    }
}
