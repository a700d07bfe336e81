//! Formatting of vCPU numbers.

use std::fmt::Write as _;

/// Formats ascending vCPU numbers, for example `vCPU 1`, `vCPUs 1 to 3`, or `vCPUs 0, 2`.
pub fn vcpu_names(numbers: &[u32]) -> String {
    match numbers {
        [] => "no vCPU".into(),
        [one] => format!("vCPU {one}"),
        [first, .., last] if numbers.len() > 2 && (*first..=*last).eq(numbers.iter().copied()) => {
            format!("vCPUs {first} to {last}")
        }
        [first, rest @ ..] => {
            let mut text = format!("vCPUs {first}");
            for vcpu in rest {
                // Writing to a string cannot fail.
                let _ = write!(text, ", {vcpu}");
            }
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vcpu_numbers_are_formatted_as_ranges() {
        assert_eq!(vcpu_names(&[]), "no vCPU");
        assert_eq!(vcpu_names(&[63]), "vCPU 63");
        assert_eq!(vcpu_names(&[1, 2]), "vCPUs 1, 2");
        assert_eq!(vcpu_names(&[1, 2, 3]), "vCPUs 1 to 3");
        assert_eq!(vcpu_names(&[0, 2, 3]), "vCPUs 0, 2, 3");
    }
}
