//! Suggests the most similar known word for an unknown one ("did you mean").

/// Returns the word in `known` that is most similar to `word`, or `None` if no word is similar.
///
/// Two words are similar if at most a third of the letters are replaced, missing, added or
/// transposed. Of equally similar words, the first one is returned. If no word is similar and
/// `word` has at least three letters, the only known word that starts with `word` is returned.
pub fn nearest<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> Option<&'k str> {
    // Maximum length of an unknown word that is compared. A longer word is not a typing error, and
    // the comparison takes time proportional to the product of the lengths.
    const LONGEST: usize = 64;
    /// Minimum number of letters of a word that [`nearest`] accepts as a prefix of a known word.
    /// Shorter prefixes are ambiguous.
    const SHORTEST: usize = 3;
    if word.len() > LONGEST {
        return None;
    }
    let word = word.to_lowercase();
    let most = (word.chars().count() / 3).max(1);
    let known: Vec<&str> = known.into_iter().collect();
    let near = known
        .iter()
        .copied()
        .map(|known| (strsim::damerau_levenshtein(&word, &known.to_lowercase()), known))
        .filter(|(wrong, known)| *wrong <= most && *wrong < known.chars().count())
        .min_by_key(|(wrong, _)| *wrong)
        .map(|(_, known)| known);
    near.or_else(|| {
        let begins =
            |known: &&&str| word.chars().count() >= SHORTEST && known.to_lowercase().starts_with(&word);
        let mut beginnings = known.iter().filter(begins);
        match (beginnings.next(), beginnings.next()) {
            (Some(only), None) => Some(*only),
            _ => None,
        }
    })
}

/// Returns a "did you mean" question that contains the most similar known word, to append to a
/// message. Returns an empty string if there is no similar word.
pub fn did_you_mean<'k>(word: &str, known: impl IntoIterator<Item = &'k str>) -> String {
    nearest(word, known).map_or_else(String::new, |known| format!("; did you mean '{known}'?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_finds_typing_errors_only() {
        const KNOWN: [&str; 4] = ["cycles", "instructions", "vm-exits", "cs"];
        for (word, meant) in [
            ("cylces", Some("cycles")),
            ("Cycle", Some("cycles")),
            ("instuctions", Some("instructions")),
            ("vm_exits", Some("vm-exits")),
            ("c", Some("cs")),
            ("x", None),
            ("", None),
            ("bananas", None),
            ("ins", Some("instructions")),
            ("in", None),
        ] {
            assert_eq!(nearest(word, KNOWN), meant, "{word}");
        }
        assert_eq!(nearest(&"cycles".repeat(20), KNOWN), None);
        assert_eq!(did_you_mean("cylces", KNOWN), "; did you mean 'cycles'?");
        assert_eq!(did_you_mean("web1", ["web2", "web1x"]), "; did you mean 'web2'?");
        assert_eq!(did_you_mean("web-of", ["web-of-one-1", "web-of-one-2"]), "");
    }
}
