//! Tables of what was measured are on one page, `docs/measurements/figures.md`, which is made from
//! `figures.json` beside it. Each says with which command it is measured again, on which day its figures were
//! written down, and where they are from. The other pages there explain and argue.
//!
//! `make figures` writes the page; without it the page is compared.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use integration::artefacts::workspace;
use serde::Deserialize;

/// One table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    /// A short name that does not change.
    id: String,
    /// The page that explains it.
    page: String,
    title: String,
    /// What measures it again.
    command: String,
    /// The day on which the figures were written down.
    date: String,
    /// On what they were measured.
    host: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// What is wrong with it.
    fn fault(&self) -> Option<String> {
        let date: Vec<&str> = self.date.split('-').collect();
        let digits = |text: &str, count| text.len() == count && text.bytes().all(|b| b.is_ascii_digit());
        let is_date = matches!(date[..], [y, m, d] if digits(y, 4) && digits(m, 2) && digits(d, 2));
        let texts = [&self.id, &self.page, &self.title, &self.command, &self.host];
        if texts.iter().any(|text| text.trim().is_empty()) {
            return Some("something is empty".to_owned());
        }
        if !is_date {
            return Some(format!("{:?} is no date", self.date));
        }
        if self.rows.is_empty() {
            return Some("it has no rows".to_owned());
        }
        let odd = self.rows.iter().find(|row| row.len() != self.columns.len());
        odd.map(|row| {
            format!(
                "a row of {} cells below {} columns: {row:?}",
                row.len(),
                self.columns.len()
            )
        })
    }

    fn write_to(&self, page: &mut String) {
        let line = |cells: &[String]| {
            let mut line = "|".to_owned();
            for cell in cells {
                let _ = write!(line, " {cell} |");
            }
            line.replace("|  |", "| |").replace("|  |", "| |")
        };
        let _ = write!(
            page,
            "\n## {}\n\n    {}\n\n{}, explained in [{}]({}). Host:\n{}.\n\n{}\n|{}\n",
            self.title,
            self.command,
            self.date,
            self.page.trim_end_matches(".md"),
            self.page,
            self.host,
            line(&self.columns),
            "---|".repeat(self.columns.len()),
        );
        for row in &self.rows {
            let _ = writeln!(page, "{}", line(row));
        }
    }
}

fn folder() -> PathBuf {
    workspace().join("docs/measurements")
}

fn tables() -> Vec<Table> {
    let text = fs::read_to_string(folder().join("figures.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn rendered(tables: &[Table]) -> String {
    let mut page = "# Figures\n\n\
        What was measured, each table with the command that measures it again, the day on which its figures were\n\
        written down, and where they are from. The pages beside this one say what the figures mean. Figures of other\n\
        days, hosts and programs differ; `make bench-check` holds the counts of instructions.\n\n\
        This page is made from `figures.json` (`make figures`): change that file.\n"
        .to_owned();
    for table in tables {
        table.write_to(&mut page);
    }
    page
}

/// Nobody has to trust a figure of unknown age and origin.
#[test]
fn each_table_says_when_where_and_how() {
    let tables = tables();
    let mut seen = BTreeSet::new();
    for table in &tables {
        assert_eq!(table.fault(), None, "{}", table.id);
        assert!(seen.insert(&table.id), "{} is there twice", table.id);
        assert!(
            folder().join(&table.page).is_file(),
            "{}: no page {}",
            table.id,
            table.page
        );
    }
}

/// The page is what the file says.
#[test]
fn the_page_is_made_from_the_file() {
    let (page, path) = (rendered(&tables()), folder().join("figures.md"));
    if std::env::var_os("PERFVISOR_FIGURES").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let there = fs::read_to_string(&path).unwrap_or_default();
    let differs = there
        .lines()
        .zip(page.lines())
        .find(|(there, made)| there != made);
    assert!(
        there == page,
        "docs/measurements/figures.md is not what figures.json says (make figures writes it); the first line that differs: {differs:?}"
    );
}

/// Each page that explains a table leads to it, and has no copy.
#[test]
fn a_table_is_on_one_page_alone() {
    for table in tables() {
        let text = fs::read_to_string(folder().join(&table.page)).unwrap();
        let link = format!("[{}](figures.md#", table.title);
        assert!(
            text.contains(&link),
            "{} does not lead to {:?}",
            table.page,
            table.title
        );
        for row in &table.rows {
            let copy = format!("| {} |", row.join(" | "));
            assert!(
                !text.contains(&copy),
                "{} repeats a row of figures.md: {copy}",
                table.page
            );
        }
    }
}

#[test]
fn a_table_that_lacks_something_is_refused() {
    let table = |date: &str, row: &[&str]| Table {
        id: "x".to_owned(),
        page: "x.md".to_owned(),
        title: "X".to_owned(),
        command: "make x".to_owned(),
        date: date.to_owned(),
        host: "here".to_owned(),
        columns: vec!["a".to_owned(), "b".to_owned()],
        rows: vec![row.iter().map(|cell| (*cell).to_owned()).collect()],
    };
    assert_eq!(table("2026-01-02", &["1", "2"]).fault(), None);
    assert!(table("yesterday", &["1", "2"]).fault().is_some());
    assert!(table("2026-01-02", &["1"]).fault().is_some());
}
