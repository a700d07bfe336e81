//! Output of `perfvisor top` as text and on a terminal, from the same tables.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, Paragraph};

use super::rows::{EventRateCell, ObservedVmState, TopSymbolRow, TopVcpuRow, TopVmData, TopVmEntry};
use super::sheet::{TopCellValue, TopColumnKind, TopRowOwner, TopSortableTable, TopTableColumn, TopTableRow};
use super::ui::{ScreenAreas, TopUiState, TopView};
use crate::commands::one_line;
use control_api::events::format::{rounded, thousands};
use control_api::protocol::GuestCounter;

/// Maximum number of symbol rows and of process rows in the text output.
const TEXT_LINES: usize = 30;
const KEYS: &str = "q quit  h keys  Tab view  s sort  r reverse  / search  Enter open  Esc back";
/// Help text for the key h, listing all keys.
const HELP: &[&str] = &[
    "q, Ctrl-C           quit",
    "h, ?                these keys; any key closes them",
    "Tab, Shift-Tab      next or previous view",
    "1 to 9              the view at that position of the bar",
    "s, S                sort by the next or previous column",
    "r                   reverse the order",
    "/                   show only rows with a text",
    "Enter               open the row: the functions of a VM or process",
    "Esc                 back; in the first view, quit",
    "z                   discard the samples so far",
    "arrows, page keys   choose a row",
];

/// Data of all displayed VMs, and the sampling parameters.
#[derive(Clone, Debug)]
pub struct TopScreen {
    /// Name of the sampled event.
    pub event: String,
    /// Sampling frequency per vCPU, in Hz.
    pub frequency_hz: u64,
    /// `true` if all VMs of the host are displayed.
    pub all_vms: bool,
    /// Displayed VMs.
    pub vms: Vec<TopVmEntry>,
}

const fn column(title: &'static str, width: u16, kind: TopColumnKind) -> TopTableColumn {
    TopTableColumn { title, width, kind }
}

/// Weight and number of the samples of one process, summed over its functions.
#[derive(Default)]
struct ProcessSum<'a> {
    weight: f64,
    samples: u64,
    kernel: f64,
    process: &'a str,
    owner: TopRowOwner,
    hottest: Option<(&'a TopSymbolRow, f64)>,
}

impl TopScreen {
    /// Returns the label and the data of each selected VM that has reported data.
    fn seen<'a>(&'a self, ui: &'a TopUiState) -> impl Iterator<Item = (&'a str, &'a TopVmData)> {
        let chosen = |label: &str| ui.vm.as_deref().is_none_or(|only| only == label);
        self.vms.iter().filter_map(move |vm| match &vm.state {
            ObservedVmState::Shown(seen) if chosen(&vm.label) => Some((vm.label.as_str(), &**seen)),
            _ => None,
        })
    }

    fn headline(&self) -> String {
        let ui = TopUiState::default();
        let sum = |of: fn(&TopVmData) -> u64| self.seen(&ui).map(|(_, vm)| of(vm)).sum();
        let (samples, lost): (u64, u64) = (sum(|vm| vm.samples), sum(|vm| vm.lost));
        let taken = format!(
            "{} samples of {} at {} Hz, {} lost",
            thousands(samples),
            self.event,
            self.frequency_hz,
            thousands(lost)
        );
        if self.all_vms {
            let seen = self.seen(&ui).count();
            return match self.vms.len() {
                0 => "perfvisor top: no VM is running".to_owned(),
                n => format!(
                    "perfvisor top: {seen} of {n} VM{}; {taken}",
                    if n == 1 { "" } else { "s" }
                ),
            };
        }
        let Some((_, TopVmData { vm, .. })) = self.seen(&ui).next() else {
            return "perfvisor top: waiting for samples".to_owned();
        };
        format!(
            "perfvisor top: VM '{}', {}, {} vCPU{}, PMU {}, up {} s; {taken}",
            one_line(&vm.name),
            vm.state,
            vm.vcpus,
            if vm.vcpus == 1 { "" } else { "s" },
            one_line(&vm.pmu),
            vm.uptime_ms / 1000
        )
    }

    /// Formats all views as text, one after another.
    pub fn text(&self) -> String {
        let mut out = self.headline();
        out.push('\n');
        let mut ui = TopUiState::new(self.all_vms);
        for view in TopView::available(self.all_vms) {
            ui.view = *view;
            let mut sheet = self.sheet(&ui);
            let _ = writeln!(out, "\n{}", view.title());
            if matches!(view, TopView::Symbols | TopView::Processes) {
                sheet.rows.truncate(TEXT_LINES);
            }
            sheet.write(&mut out);
        }
        out
    }

    /// Draws the selected view on a terminal.
    pub fn draw(&self, frame: &mut Frame<'_>, ui: &mut TopUiState) {
        let rows = [
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ];
        let [head, tabs, body, foot] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Line::from(self.headline()).style(Modifier::BOLD), head);
        let mut drawn = ScreenAreas::default();
        let mut spans = Vec::new();
        let mut x = tabs.x;
        for (i, view) in TopView::available(self.all_vms).iter().enumerate() {
            let name = format!(" {} {} ", i + 1, view.title());
            let width = u16::try_from(name.len()).unwrap_or(u16::MAX);
            drawn.tabs.push(Rect::new(x, tabs.y, width, 1).intersection(tabs));
            x = x.saturating_add(width + 1);
            let style = match *view == ui.view {
                true => Style::new().add_modifier(Modifier::REVERSED),
                false => Style::new(),
            };
            spans.extend([Span::styled(name, style), Span::raw(" ")]);
        }
        frame.render_widget(Line::from(spans), tabs);
        let mut sheet = self.sheet(ui);
        sheet.search(&ui.search);
        let shown = ui.view_state();
        sheet.sort(shown.sort, shown.reverse);
        // The first line holds the column titles.
        let titles = Rect {
            height: body.height.min(1),
            ..body
        };
        drawn.rows = Rect {
            y: body.y + titles.height,
            height: body.height - titles.height,
            ..body
        };
        let room = usize::from(drawn.rows.height);
        drawn.titles = sheet.column_areas(titles);
        let shown = ui.shown_mut();
        shown.cursor = shown.cursor.min(sheet.rows.len().saturating_sub(1));
        let least = (shown.cursor + 1).saturating_sub(room.max(1));
        let most = sheet.rows.len().saturating_sub(room).max(least);
        shown.offset = shown.offset.clamp(least, most.min(shown.cursor).max(least));
        frame.render_widget(sheet.table(shown.offset, room, shown.cursor, shown.sort), body);
        let found = sheet.rows.len();
        drawn.row_owners = sheet.rows.into_iter().map(|row| row.owner).collect();
        ui.areas = drawn;
        if ui.help {
            let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(*line)).collect();
            frame.render_widget(Clear, body);
            frame.render_widget(Paragraph::new(lines), body);
        }
        let line = match self.foot(ui, found) {
            Some(said) => Line::from(said).style(Modifier::BOLD),
            None => Line::from(KEYS).style(Color::DarkGray),
        };
        frame.render_widget(line, foot);
    }

    /// Returns the footer of the screen: the search text while it is being typed, the reason the VM
    /// under the cursor cannot be observed, or which rows are hidden.
    fn foot(&self, ui: &TopUiState, found: usize) -> Option<String> {
        if ui.typing {
            return Some(format!(
                "/{}_  ({found} found; Enter keeps, Esc takes back)",
                ui.search
            ));
        }
        let chosen = ui
            .areas
            .row_owners
            .get(ui.view_state().cursor)
            .map(|whose| &whose.vm);
        if let (TopView::Vms, Some(vm)) = (ui.view, self.vms.iter().find(|vm| Some(&vm.label) == chosen))
            && let ObservedVmState::Failed(why) = &vm.state
        {
            return Some(format!("{}: {}", one_line(&vm.label), one_line(why)));
        }
        let mut said = Vec::new();
        if let Some(vm) = &ui.vm {
            said.push(format!("VM {}", one_line(vm)));
        }
        if let (Some(whose), TopView::Symbols) = (&ui.process, ui.view) {
            said.push(match whose.pid {
                Some(pid) => format!("process {pid} of {}", one_line(&whose.vm)),
                None => format!("no process of {}", one_line(&whose.vm)),
            });
        }
        if !ui.search.is_empty() {
            said.push(format!("'{}' ({found} found)", ui.search));
        }
        (!said.is_empty()).then(|| format!("only {}; Esc: back", said.join(", ")))
    }

    fn sheet(&self, ui: &TopUiState) -> TopSortableTable {
        let (columns, rows) = match ui.view {
            TopView::Vms => self.vm_rows(),
            TopView::Symbols => self.symbol_rows(ui),
            TopView::Processes => self.process_rows(ui),
            TopView::Vcpus => self.vcpu_rows(ui),
            TopView::Exits => self.exit_rows(ui),
            TopView::Counters => self.counter_rows(ui),
        };
        let mut sheet = TopSortableTable { columns, rows };
        // With several VMs, the first column is the VM.
        if self.all_vms && !matches!(ui.view, TopView::Vms | TopView::Symbols) {
            sheet.columns.insert(0, column("VM", 16, TopColumnKind::Text));
            for row in &mut sheet.rows {
                row.cells.insert(0, TopCellValue::text(one_line(&row.owner.vm)));
            }
        }
        sheet
    }

    fn vm_rows(&self) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let everything = TopUiState::default();
        let weight = |vm: &TopVmData| vm.symbols.iter().map(|row| row.weight).sum::<f64>();
        let all: f64 = self.seen(&everything).map(|(_, vm)| weight(vm)).sum();
        let row = |vm: &TopVmEntry| {
            let mut cells = vec![TopCellValue::text(one_line(&vm.label))];
            match &vm.state {
                ObservedVmState::Shown(seen) => {
                    let its = weight(seen);
                    let sum = |at| EventRateCell::sum(seen.vcpus.iter().map(|vcpu| cell(vcpu, at)));
                    cells.extend([
                        TopCellValue::text(seen.vm.state.to_string()),
                        share_of(its, all),
                        TopCellValue::number(seen.vm.vcpus.into(), seen.vm.vcpus.to_string()),
                        narrow_rate(sum(0), percent),
                        narrow_rate(sum(1), percent),
                        narrow_rate(sum(2), whole),
                        narrow_rate(sum(3), whole),
                        count(seen.samples),
                        count(seen.lost),
                        TopCellValue::text(one_line(&seen.vm.pmu)),
                    ]);
                }
                other => {
                    let state = match other {
                        ObservedVmState::Ended => "ended",
                        ObservedVmState::Failed(_) => "failed",
                        _ => "waiting",
                    };
                    cells.push(TopCellValue::text(state));
                    cells.resize(11, TopCellValue::text("-"));
                }
            }
            TopTableRow::of_vm(&vm.label, cells)
        };
        let columns = vec![
            column("VM", 16, TopColumnKind::Text),
            column("State", 14, TopColumnKind::Text),
            column("Share", 7, TopColumnKind::Count),
            column("vCPUs", 5, TopColumnKind::Count),
            column("Busy", 7, TopColumnKind::Count),
            column("Steal", 7, TopColumnKind::Count),
            column("Cycles/s", 15, TopColumnKind::Count),
            column("KVM exits/s", 11, TopColumnKind::Count),
            column("Samples", 9, TopColumnKind::Count),
            column("Lost", 6, TopColumnKind::Count),
            column("PMU", 6, TopColumnKind::Text),
        ];
        (columns, self.vms.iter().map(row).collect())
    }

    /// Returns the sampled functions of the selected VM and process, or of all VMs and processes
    /// without a selection.
    fn functions<'a>(&'a self, ui: &'a TopUiState) -> impl Iterator<Item = (&'a str, &'a TopSymbolRow)> {
        let chosen = |label: &str, row: &TopSymbolRow| match &ui.process {
            Some(only) if ui.view == TopView::Symbols => only.vm == label && only.pid == row.pid,
            _ => true,
        };
        let functions =
            |(label, vm): (&'a str, &'a TopVmData)| vm.symbols.iter().map(move |row| (label, row));
        self.seen(ui)
            .flat_map(functions)
            .filter(move |(label, row)| chosen(label, row))
    }

    fn symbol_rows(&self, ui: &TopUiState) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let mut sums: BTreeMap<(&str, &str, bool), (f64, u64)> = BTreeMap::new();
        let mut all = 0.0;
        for (_, row) in self.functions(ui) {
            let sum = sums.entry((&row.symbol, &row.object, row.kernel)).or_default();
            sum.0 += row.weight;
            sum.1 += row.samples;
            all += row.weight;
        }
        let row = |((symbol, object, kernel), (weight, samples)): ((&str, &str, bool), (f64, u64))| {
            let style = match 100.0 * weight / all {
                p if p >= 5.0 => Style::new().fg(Color::Red),
                p if p >= 0.5 => Style::new().fg(Color::Green),
                _ => Style::new(),
            };
            let level = if kernel { "[k]" } else { "[.]" };
            let more = [
                TopCellValue::text(object),
                TopCellValue::text(format!("{level} {symbol}")),
            ];
            TopTableRow {
                style,
                ..sample_row(weight, all, samples, more)
            }
        };
        let more = [
            column("Object", 28, TopColumnKind::Text),
            column("Symbol", 0, TopColumnKind::Text),
        ];
        sample_columns_and_rows(sums.into_iter().map(row), more)
    }

    fn process_rows(&self, ui: &TopUiState) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let mut sums: BTreeMap<(&str, Option<u32>), ProcessSum<'_>> = BTreeMap::new();
        let mut all = 0.0;
        for (label, row) in self.functions(ui) {
            let sum = sums.entry((label, row.pid)).or_default();
            sum.weight += row.weight;
            sum.samples += row.samples;
            sum.kernel += if row.kernel { row.weight } else { 0.0 };
            sum.process = &row.process;
            sum.owner = TopRowOwner {
                vm: label.to_owned(),
                pid: row.pid,
            };
            if sum.hottest.is_none_or(|(_, most)| row.weight > most) {
                sum.hottest = Some((row, row.weight));
            }
            all += row.weight;
        }
        let row = |sum: ProcessSum<'_>| {
            let more = [
                share_of(sum.kernel, sum.weight),
                sum.owner.pid.map_or_else(
                    || TopCellValue::text("-"),
                    |pid| TopCellValue::number(pid.into(), pid.to_string()),
                ),
                TopCellValue::text(if sum.owner.pid.is_none() {
                    "[unknown]"
                } else {
                    sum.process
                }),
                TopCellValue::text(sum.hottest.map_or("", |(row, _)| &row.symbol)),
            ];
            TopTableRow {
                owner: sum.owner,
                ..sample_row(sum.weight, all, sum.samples, more)
            }
        };
        let more = [
            column("In kernel", 9, TopColumnKind::Count),
            column("PID", 7, TopColumnKind::Id),
            column("Process", 16, TopColumnKind::Text),
            column("Hottest function", 0, TopColumnKind::Text),
        ];
        sample_columns_and_rows(sums.into_values().map(row), more)
    }

    fn vcpu_rows(&self, ui: &TopUiState) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let row = |label: &str, v: &TopVcpuRow| {
            let cells = vec![
                TopCellValue::number(v.vcpu.into(), v.vcpu.to_string()),
                rate(cell(v, 0), percent),
                rate(cell(v, 1), percent),
                rate(cell(v, 2), whole),
                rate(cell(v, 3), whole),
                count(v.samples),
            ];
            TopTableRow::of_vm(label, cells)
        };
        let columns = vec![
            column("vCPU", 5, TopColumnKind::Id),
            column("Busy", 15, TopColumnKind::Count),
            column("Steal", 15, TopColumnKind::Count),
            column("Cycles/s", 20, TopColumnKind::Count),
            column("KVM exits/s", 15, TopColumnKind::Count),
            column("Samples", 10, TopColumnKind::Count),
        ];
        let rows = self
            .seen(ui)
            .flat_map(|(label, vm)| vm.vcpus.iter().map(move |v| row(label, v)));
        (columns, rows.collect())
    }

    fn exit_rows(&self, ui: &TopUiState) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let us = |ns: Option<u64>| match ns {
            Some(ns) => TopCellValue::number(ns as f64, format!("{:.1}", ns as f64 / 1e3)),
            None => TopCellValue::text("-"),
        };
        let mut rows = Vec::new();
        for (label, vm) in self.seen(ui) {
            let mut exits: Vec<_> = vm.exits.iter().collect();
            // Exits with the highest time come first, and untimed exits come last.
            exits.sort_by(|a, b| {
                let time = |row: &super::rows::TopExitRow| row.time_share.unwrap_or(-1.0);
                time(b)
                    .total_cmp(&time(a))
                    .then(b.per_second.total_cmp(&a.per_second))
            });
            rows.extend(exits.into_iter().map(|exit| {
                let cells = vec![
                    TopCellValue::text(if exit.kvm { "KVM" } else { "Perfvisor" }),
                    TopCellValue::text(exit.what.clone()),
                    TopCellValue::number(exit.per_second, format!("{:.1}", exit.per_second)),
                    exit.time_share.map_or_else(
                        || TopCellValue::text("-"),
                        |share| TopCellValue::number(share, format!("{:.2}%", 100.0 * share)),
                    ),
                    us(exit.mean_ns),
                    us(exit.longest_ns),
                ];
                TopTableRow::of_vm(label, cells)
            }));
        }
        let columns = vec![
            column("Of", 9, TopColumnKind::Text),
            column("Exits", 24, TopColumnKind::Text),
            column("A second", 12, TopColumnKind::Count),
            column("Time", 8, TopColumnKind::Count),
            column("Mean (us)", 10, TopColumnKind::Count),
            column("Max (us)", 10, TopColumnKind::Count),
        ];
        (columns, rows)
    }

    fn counter_rows(&self, ui: &TopUiState) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
        let mut rows = Vec::new();
        for (label, vm) in self.seen(ui) {
            for view in &vm.views {
                let its = view.counters.iter().map(|c| TopTableRow {
                    style: match state(c) {
                        "on" => Style::new().add_modifier(Modifier::BOLD),
                        _ => Style::new(),
                    },
                    ..TopTableRow::of_vm(label, counter(view.vcpu, c))
                });
                rows.extend(its);
            }
        }
        let columns = vec![
            column("vCPU", 5, TopColumnKind::Id),
            column("Counter", 8, TopColumnKind::Text),
            column("State", 8, TopColumnKind::Text),
            column("Event", 24, TopColumnKind::Text),
            column("Backing", 9, TopColumnKind::Text),
            column("Counted", 22, TopColumnKind::Count),
            column("Running", 8, TopColumnKind::Count),
            column("Overflows", 12, TopColumnKind::Count),
            column("PMIs asked", 12, TopColumnKind::Count),
        ];
        (columns, rows)
    }
}

/// Creates a row of sampled data, with the share of the total weight, the number of samples, and
/// further cells.
fn sample_row(
    weight: f64,
    all: f64,
    samples: u64,
    more: impl IntoIterator<Item = TopCellValue>,
) -> TopTableRow {
    let cells = [share_of(weight, all), count(samples)].into_iter().chain(more);
    TopTableRow::new(cells.collect())
}

/// Returns the columns and rows of sampled data in descending order of weight. The sort is stable.
fn sample_columns_and_rows(
    rows: impl Iterator<Item = TopTableRow>,
    more: impl IntoIterator<Item = TopTableColumn>,
) -> (Vec<TopTableColumn>, Vec<TopTableRow>) {
    let first = [
        column("Self", 8, TopColumnKind::Count),
        column("Samples", 10, TopColumnKind::Count),
    ];
    let mut sheet = TopSortableTable {
        columns: first.into_iter().chain(more).collect(),
        rows: rows.collect(),
    };
    sheet.sort(Some(0), false);
    (sheet.columns, sheet.rows)
}

fn cell(vcpu: &TopVcpuRow, at: usize) -> EventRateCell {
    vcpu.cells.get(at).copied().unwrap_or(EventRateCell::NotSupported)
}

fn percent(ns: f64) -> String {
    format!("{:.1}%", ns / 1e7)
}

fn whole(n: f64) -> String {
    thousands(rounded(n))
}

fn count(n: u64) -> TopCellValue {
    TopCellValue::number(n as f64, thousands(n))
}

/// Formats a number that KVM's own vPMU may not report.
fn count_or_unknown(n: Option<u64>) -> TopCellValue {
    n.map_or_else(|| TopCellValue::text("unknown"), count)
}

fn share_of(part: f64, all: f64) -> TopCellValue {
    match all > 0.0 {
        true => TopCellValue::number(part / all, format!("{:.2}%", 100.0 * part / all)),
        false => TopCellValue::text("-"),
    }
}

fn rate(cell: EventRateCell, show: impl Fn(f64) -> String) -> TopCellValue {
    match cell {
        EventRateCell::NotSupported => TopCellValue::text("<not supported>"),
        EventRateCell::NotCounted => TopCellValue::text("<not counted>"),
        EventRateCell::Rate { per_second, share } if share < 0.995 => TopCellValue::number(
            per_second,
            format!("{} ({:.0}%)", show(per_second), 100.0 * share),
        ),
        EventRateCell::Rate { per_second, .. } => TopCellValue::number(per_second, show(per_second)),
    }
}

/// Formats a rate for a narrow column. The text is `-` if the event was not counted.
fn narrow_rate(cell: EventRateCell, show: impl Fn(f64) -> String) -> TopCellValue {
    match cell {
        EventRateCell::NotSupported | EventRateCell::NotCounted => TopCellValue::text("-"),
        EventRateCell::Rate { per_second, .. } => TopCellValue::number(per_second, show(per_second)),
    }
}

fn state(c: &GuestCounter) -> &'static str {
    match (c.enabled, c.allowed) {
        (_, false) => "filtered",
        (true, true) if c.counting == Some(false) => "uncounted",
        (true, true) => "on",
        (false, true) => "off",
    }
}

/// Formats the row of a guest counter.
fn counter(vcpu: u32, c: &GuestCounter) -> Vec<TopCellValue> {
    let backing = c.backing.as_deref().unwrap_or("-");
    // The value of an unbacked counter is the value written by the guest, not a count.
    let counted = match backing {
        "none" => TopCellValue::text("<not supported>"),
        "-" => TopCellValue::text("-"),
        _ => count_or_unknown(c.counted),
    };
    let share = match (c.enabled_ns, c.running_ns) {
        (Some(0), _) => TopCellValue::text("-"),
        (Some(enabled), Some(running)) => {
            let share = running as f64 / enabled as f64;
            TopCellValue::number(share, format!("{:.1}%", 100.0 * share))
        }
        _ => TopCellValue::text("unknown"),
    };
    vec![
        TopCellValue::number(vcpu.into(), vcpu.to_string()),
        TopCellValue::text(one_line(&c.counter)),
        TopCellValue::text(state(c)),
        TopCellValue::text(c.event.as_deref().map_or_else(|| "-".to_owned(), one_line)),
        TopCellValue::text(match c.fallback {
            true => format!("{} (fallback)", one_line(backing)),
            false => one_line(backing),
        }),
        counted,
        share,
        count_or_unknown(c.overflows),
        count_or_unknown(c.pmi_requests),
    ]
}

#[cfg(test)]
#[path = "screen/tests.rs"]
mod tests;
