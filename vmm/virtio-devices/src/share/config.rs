//! Configuration of a shared directory (`--share`).

use std::path::PathBuf;
use std::str::FromStr;

/// Maximum length of a mount tag, in bytes (virtio 1.2, 5.11.4).
pub const MAX_TAG_BYTES: usize = 36;

/// Backend of a shared directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShareBackendSource {
    /// A directory, exported by a virtiofsd process that the VMM starts for this device.
    Directory {
        /// Path of the shared directory on the host.
        path: PathBuf,
        /// `true` if the guest cannot modify the directory.
        read_only: bool,
        /// Mode of virtiofsd's sandbox, or `None` for its default.
        sandbox: Option<VirtiofsdSandbox>,
    },
    /// Path of the socket of a vhost-user-fs backend that is already running.
    Socket(PathBuf),
}

/// Mode of the sandbox in which virtiofsd runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtiofsdSandbox {
    /// A sandbox with separate namespaces.
    Namespace,
    /// A sandbox that uses only chroot, for environments without namespaces such as containers and
    /// initial RAM disks.
    Chroot,
}

impl VirtiofsdSandbox {
    /// Returns the value of virtiofsd's `--sandbox` option.
    pub fn word(self) -> &'static str {
        match self {
            Self::Namespace => "namespace",
            Self::Chroot => "chroot",
        }
    }
}

/// Configuration of a shared directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareConfig {
    /// Backend of the shared directory.
    pub source: ShareBackendSource,
    /// Mount tag, or `None` for the default tag, which is `share` followed by the device's index.
    pub tag: Option<String>,
}

/// Error returned when a shared directory configuration is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShareConfigError {
    /// The option names neither a directory nor a socket.
    #[error("must be DIR[,ro][,tag=NAME] or socket=PATH[,tag=NAME]")]
    Shape,
    /// The configuration contains an unknown option.
    #[error("unknown option '{0}'; known are ro, tag=NAME and sandbox=namespace|chroot")]
    Word(String),
    /// The option is valid only for a virtiofsd that the VMM starts.
    #[error("{0}: unsupported with socket=PATH; set it when starting the back end")]
    NotOurs(String),
    /// The mount tag is invalid.
    #[error("a tag must have between 1 and {MAX_TAG_BYTES} bytes")]
    Tag,
}

impl FromStr for ShareConfig {
    type Err = ShareConfigError;

    fn from_str(text: &str) -> Result<Self, ShareConfigError> {
        let mut words = text.split(',');
        let first = words
            .next()
            .filter(|word| !word.is_empty())
            .ok_or(ShareConfigError::Shape)?;
        let (mut read_only, mut sandbox, mut tag) = (false, None, None);
        let socket = first.strip_prefix("socket=");
        for word in words {
            match word.split_once('=') {
                Some(("tag", name)) if (1..=MAX_TAG_BYTES).contains(&name.len()) => {
                    tag = Some(name.to_owned())
                }
                Some(("tag", _)) => return Err(ShareConfigError::Tag),
                _ if socket.is_some() => return Err(ShareConfigError::NotOurs(word.to_owned())),
                None if word == "ro" => read_only = true,
                Some(("sandbox", "namespace")) => sandbox = Some(VirtiofsdSandbox::Namespace),
                Some(("sandbox", "chroot")) => sandbox = Some(VirtiofsdSandbox::Chroot),
                _ => return Err(ShareConfigError::Word(word.to_owned())),
            }
        }
        let source = match socket {
            Some("") => return Err(ShareConfigError::Shape),
            Some(path) => ShareBackendSource::Socket(path.into()),
            None => ShareBackendSource::Directory {
                path: first.into(),
                read_only,
                sandbox,
            },
        };
        Ok(Self { source, tag })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_and_sockets() {
        let share: ShareConfig = "/srv/a b,ro,tag=build,sandbox=chroot".parse().unwrap();
        let source = ShareBackendSource::Directory {
            path: "/srv/a b".into(),
            read_only: true,
            sandbox: Some(VirtiofsdSandbox::Chroot),
        };
        assert_eq!((share.source, share.tag.as_deref()), (source, Some("build")));
        let share: ShareConfig = "socket=/run/fs".parse().unwrap();
        assert_eq!(
            (share.source, share.tag),
            (ShareBackendSource::Socket("/run/fs".into()), None)
        );
    }

    #[test]
    fn mistakes_are_named() {
        use ShareConfigError as E;
        let long = format!("d,tag={}", "t".repeat(37));
        for (text, error) in [
            ("", E::Shape),
            (",ro", E::Shape),
            ("socket=", E::Shape),
            ("d,rw", E::Word("rw".into())),
            ("d,sandbox=none", E::Word("sandbox=none".into())),
            ("socket=s,ro", E::NotOurs("ro".into())),
            ("d,tag=", E::Tag),
            (&long, E::Tag),
        ] {
            assert_eq!(text.parse::<ShareConfig>(), Err(error), "{text}");
        }
    }
}
