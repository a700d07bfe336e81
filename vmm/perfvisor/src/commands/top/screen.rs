//! What `perfvisor top` shows: as text, and drawn on a terminal from the same rows.

use std::fmt::Write as _;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Row, Table};

use control_api::events::format::{rounded, thousands};
use control_api::protocol::{VcpuView, VmInfo};

/// Lines of symbols in the text.
const TEXT_SYMBOLS: usize = 30;
const VIEWS: [&str; 3] = ["Symbols", "vCPUs", "Guest counters"];
const KEYS: &str = "q quit  Tab/1-3 view  s sort  r reverse  z forget  arrows scroll";

/// Everything that is shown at one moment.
#[derive(Clone, Debug)]
pub struct Screen {
    /// The VM.
    pub vm: VmInfo,
    /// The event that is sampled.
    pub event: String,
    /// How often on each vCPU.
    pub frequency_hz: u64,
    /// Samples taken so far.
    pub samples: u64,
    /// Samples that were lost.
    pub lost: u64,
    /// Where they fell, in no order.
    pub symbols: Vec<SymbolRow>,
    /// The vCPUs, in order.
    pub vcpus: Vec<VcpuRow>,
    /// What their guests count.
    pub views: Vec<VcpuView>,
}

/// A function.
#[derive(Clone, Debug, PartialEq)]
pub struct SymbolRow {
    /// Its share of all samples' weight.
    pub percent: f64,
    /// Samples in it, while it is on the list.
    pub samples: u64,
    /// The file it is in.
    pub object: String,
    /// Its name.
    pub symbol: String,
    /// It is the guest kernel's.
    pub kernel: bool,
}

/// A vCPU.
#[derive(Clone, Debug, PartialEq)]
pub struct VcpuRow {
    /// Its number.
    pub vcpu: u32,
    /// Samples since the last screen.
    pub samples: u64,
    /// task-clock, steal-ns, cycles and KVM's exits, a second.
    pub cells: Vec<Cell>,
}

/// A rate, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell {
    /// It cannot be counted here.
    NotSupported,
    /// It was not on.
    NotCounted,
    /// It was counted.
    Rate {
        /// Counts a second.
        per_second: f64,
        /// Share of the time it was on.
        share: f64,
    },
}

impl Cell {
    fn with(self, show: impl Fn(f64) -> String) -> String {
        match self {
            Cell::NotSupported => "<not supported>".into(),
            Cell::NotCounted => "<not counted>".into(),
            Cell::Rate { per_second, share } if share < 0.995 => {
                format!("{} ({:.0}%)", show(per_second), 100.0 * share)
            }
            Cell::Rate { per_second, .. } => show(per_second),
        }
    }
}

/// What symbols are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sort {
    #[default]
    Share,
    Symbol,
    Object,
}

/// What the user has chosen to see.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ui {
    view: usize,
    sort: Sort,
    /// The other way round.
    pub reverse: bool,
    offset: usize,
}

impl Ui {
    /// Sorts by the next column.
    pub fn next_sort(&mut self) {
        self.sort = match self.sort {
            Sort::Share => Sort::Symbol,
            Sort::Symbol => Sort::Object,
            Sort::Object => Sort::Share,
        };
    }

    /// Shows view `n`, 0 to 2.
    pub fn show(&mut self, n: usize) {
        self.view = n % VIEWS.len();
        self.offset = 0;
    }

    /// Shows the next view.
    pub fn next_view(&mut self) {
        self.show(self.view + 1);
    }

    /// Moves down by so many lines.
    pub fn scroll(&mut self, by: isize) {
        self.offset = self.offset.saturating_add_signed(by);
    }
}

/// A table: titles with their widths (0: what is left), and rows.
struct Sheet {
    titles: Vec<(&'static str, u16, bool)>,
    rows: Vec<(Vec<String>, Style)>,
}

impl Screen {
    /// Before the first samples.
    pub fn waiting(vm: &VmInfo, event: &str) -> Self {
        Self {
            vm: vm.clone(),
            event: event.to_owned(),
            frequency_hz: 0,
            samples: 0,
            lost: 0,
            symbols: Vec::new(),
            vcpus: Vec::new(),
            views: Vec::new(),
        }
    }

    fn headline(&self) -> String {
        let vm = &self.vm;
        let taken = match self.frequency_hz {
            0 => "waiting for samples".to_owned(),
            hz => format!(
                "{} samples of {} at {hz} Hz, {} lost",
                thousands(self.samples),
                self.event,
                thousands(self.lost)
            ),
        };
        format!(
            "perfvisor top: VM '{}', {}, {} vCPU{}, PMU {}, up {} s; {taken}",
            vm.name,
            vm.state,
            vm.vcpus,
            if vm.vcpus == 1 { "" } else { "s" },
            vm.pmu,
            vm.uptime_ms / 1000
        )
    }

    /// As text, all views one below the other.
    pub fn text(&self) -> String {
        let mut out = self.headline();
        out.push('\n');
        let ui = Ui::default();
        for (name, mut sheet) in
            VIEWS
                .into_iter()
                .zip([self.symbol_sheet(&ui), self.vcpu_sheet(&ui), self.counter_sheet()])
        {
            let _ = writeln!(out, "\n{name}");
            sheet.rows.truncate(if name == VIEWS[0] {
                TEXT_SYMBOLS
            } else {
                usize::MAX
            });
            sheet.write(&mut out);
        }
        out
    }

    /// On a terminal.
    pub fn draw(&self, frame: &mut Frame<'_>, ui: &mut Ui) {
        let rows = [
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Min(0),
            Constraint::Length(1),
        ];
        let [head, tabs, body, foot] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(Line::from(self.headline()).style(Modifier::BOLD), head);
        let tab = |(i, name): (usize, &'static str)| {
            let style = if i == ui.view {
                Style::new().add_modifier(Modifier::REVERSED)
            } else {
                Style::new()
            };
            [Span::styled(format!(" {} {name} ", i + 1), style), Span::raw(" ")]
        };
        let tabs_line: Line<'_> = VIEWS.into_iter().enumerate().flat_map(tab).collect();
        frame.render_widget(tabs_line, tabs);
        let sheet = match ui.view {
            0 => self.symbol_sheet(ui),
            1 => self.vcpu_sheet(ui),
            _ => self.counter_sheet(),
        };
        // One line is the titles'.
        let room = usize::from(body.height).saturating_sub(1);
        ui.offset = ui.offset.min(sheet.rows.len().saturating_sub(room));
        frame.render_widget(sheet.table(ui.offset), body);
        frame.render_widget(Line::from(KEYS).style(Color::DarkGray), foot);
    }

    fn symbol_sheet(&self, ui: &Ui) -> Sheet {
        let mut symbols: Vec<&SymbolRow> = self.symbols.iter().collect();
        symbols.sort_by(|a, b| {
            let by_name = || (&a.symbol, &a.object).cmp(&(&b.symbol, &b.object));
            match ui.sort {
                Sort::Share => b.percent.total_cmp(&a.percent).then_with(by_name),
                Sort::Symbol => by_name(),
                Sort::Object => a.object.cmp(&b.object).then(b.percent.total_cmp(&a.percent)),
            }
        });
        if ui.reverse {
            symbols.reverse();
        }
        let row = |s: &SymbolRow| {
            let color = match s.percent {
                p if p >= 5.0 => Style::new().fg(Color::Red),
                p if p >= 0.5 => Style::new().fg(Color::Green),
                _ => Style::new(),
            };
            let level = if s.kernel { "[k]" } else { "[.]" };
            let cells = vec![
                format!("{:.2}%", s.percent),
                thousands(s.samples),
                s.object.clone(),
                format!("{level} {}", s.symbol),
            ];
            (cells, color)
        };
        Sheet {
            titles: vec![
                ("Self", 8, true),
                ("Samples", 10, true),
                ("Object", 28, false),
                ("Symbol", 0, false),
            ],
            rows: symbols.into_iter().map(row).collect(),
        }
    }

    fn vcpu_sheet(&self, ui: &Ui) -> Sheet {
        let mut vcpus: Vec<&VcpuRow> = self.vcpus.iter().collect();
        if ui.reverse {
            vcpus.reverse();
        }
        let row = |v: &VcpuRow| {
            let cell = |at: usize| v.cells.get(at).copied().unwrap_or(Cell::NotSupported);
            let percent = |ns: f64| format!("{:.1}%", ns / 1e7);
            let whole = |n: f64| thousands(rounded(n));
            let cells = vec![
                v.vcpu.to_string(),
                cell(0).with(percent),
                cell(1).with(percent),
                cell(2).with(whole),
                cell(3).with(whole),
                thousands(v.samples),
            ];
            (cells, Style::new())
        };
        Sheet {
            titles: vec![
                ("vCPU", 5, true),
                ("Busy", 15, true),
                ("Steal", 15, true),
                ("Cycles/s", 20, true),
                ("KVM exits/s", 15, true),
                ("Samples", 10, true),
            ],
            rows: vcpus.into_iter().map(row).collect(),
        }
    }

    fn counter_sheet(&self) -> Sheet {
        let mut rows = Vec::new();
        for view in &self.views {
            for c in &view.counters {
                let state = match (c.enabled, c.allowed) {
                    (_, false) => "filtered",
                    (true, true) if c.counting == Some(false) => "uncounted",
                    (true, true) => "on",
                    (false, true) => "off",
                };
                let backing = c.backing.as_deref().unwrap_or("-");
                // What nobody counts for stays where the guest put it: its value is no count.
                let counted = match backing {
                    "none" => "<not supported>".to_owned(),
                    "-" => "-".to_owned(),
                    _ => known(c.counted),
                };
                let share = match (c.enabled_ns, c.running_ns) {
                    (Some(0), _) => "-".to_owned(),
                    (Some(enabled), Some(running)) => {
                        format!("{:.1}%", 100.0 * running as f64 / enabled as f64)
                    }
                    _ => "unknown".to_owned(),
                };
                let cells = vec![
                    view.vcpu.to_string(),
                    c.counter.clone(),
                    state.to_owned(),
                    c.event.clone().unwrap_or_else(|| "-".into()),
                    if c.fallback {
                        format!("{backing} (fallback)")
                    } else {
                        backing.to_owned()
                    },
                    counted,
                    share,
                    known(c.overflows),
                    known(c.pmi_requests),
                ];
                let style = if state == "on" {
                    Style::new().add_modifier(Modifier::BOLD)
                } else {
                    Style::new()
                };
                rows.push((cells, style));
            }
        }
        Sheet {
            titles: vec![
                ("vCPU", 5, true),
                ("Counter", 8, false),
                ("State", 8, false),
                ("Event", 24, false),
                ("Backing", 9, false),
                ("Counted", 22, true),
                ("Running", 8, true),
                ("Overflows", 12, true),
                ("PMIs asked", 12, true),
            ],
            rows,
        }
    }
}

impl Sheet {
    /// As text. Long cells push the line out; nothing is cut.
    fn write(&self, out: &mut String) {
        let titles = self
            .titles
            .iter()
            .map(|(title, ..)| (*title).to_owned())
            .collect();
        for row in std::iter::once(&titles).chain(self.rows.iter().map(|(row, _)| row)) {
            let mut line = String::new();
            for ((_, width, right), cell) in self.titles.iter().zip(row) {
                let width = usize::from(*width);
                let _ = if *right {
                    write!(line, " {cell:>width$}")
                } else {
                    write!(line, " {cell:<width$}")
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    fn table(self, offset: usize) -> Table<'static> {
        let widths: Vec<Constraint> = self
            .titles
            .iter()
            .map(|(_, width, _)| match width {
                0 => Constraint::Min(10),
                width => Constraint::Length(*width),
            })
            .collect();
        let columns = self.titles.clone();
        let line = move |cells: Vec<String>| {
            let lines = cells.into_iter().zip(&columns).map(|(cell, (_, _, right))| {
                let line = Line::from(cell);
                if *right { line.right_aligned() } else { line }
            });
            Row::new(lines.collect::<Vec<_>>())
        };
        let header = line(
            self.titles
                .iter()
                .map(|(title, ..)| (*title).to_owned())
                .collect(),
        );
        let rows: Vec<Row<'static>> = self
            .rows
            .into_iter()
            .skip(offset)
            .map(|(cells, style)| line(cells).style(style))
            .collect();
        Table::new(rows, widths).header(header.style(Modifier::UNDERLINED))
    }
}

/// What KVM's own vPMU does not tell is not known.
fn known(count: Option<u64>) -> String {
    count.map_or_else(|| "unknown".to_owned(), thousands)
}

#[cfg(test)]
mod tests {
    use super::*;
    use control_api::protocol::{ClientRole, GuestCounter, VmState};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn symbol(percent: f64, object: &str, symbol: &str, kernel: bool) -> SymbolRow {
        SymbolRow {
            percent,
            samples: 10,
            object: object.into(),
            symbol: symbol.into(),
            kernel,
        }
    }

    fn screen() -> Screen {
        let rate = |per_second, share| Cell::Rate { per_second, share };
        let counter = |event: Option<&str>, backing: Option<&str>| GuestCounter {
            counter: "gp0".into(),
            enabled: event.is_some(),
            event: event.map(Into::into),
            allowed: true,
            backing: backing.map(Into::into),
            value: 7,
            counted: Some(1_234_567),
            enabled_ns: Some(2),
            running_ns: Some(1),
            overflows: Some(3),
            pmi_requests: Some(2),
            counting: Some(true),
            fallback: false,
            uncounted_ns: Some(0),
        };
        Screen {
            vm: VmInfo {
                protocol: 1,
                version: String::new(),
                name: "box".into(),
                pid: 1,
                vcpus: 2,
                max_vcpus: 2,
                pmu: "amd".into(),
                guest: String::new(),
                console: String::new(),
                virtio_console: String::new(),
                threads: Vec::new(),
                state: VmState::Running,
                parked: 0,
                uptime_ms: 61_000,
                role: ClientRole::Admin,
            },
            event: "cycles".into(),
            frequency_hz: 250,
            samples: 1500,
            lost: 2,
            symbols: vec![
                symbol(10.0, "/bin/b", "cool", false),
                symbol(60.0, "/bin/a", "hot", false),
                symbol(30.0, "[guest.kernel]", "do_work", true),
            ],
            vcpus: vec![
                VcpuRow {
                    vcpu: 0,
                    samples: 5,
                    cells: vec![
                        rate(5e8, 1.0),
                        rate(1e7, 1.0),
                        rate(2.1e9, 0.5),
                        Cell::NotSupported,
                    ],
                },
                VcpuRow {
                    vcpu: 1,
                    samples: 0,
                    cells: vec![Cell::NotCounted; 4],
                },
            ],
            views: vec![VcpuView {
                vcpu: 0,
                pmis: Some(0),
                uncounted_ns: Some(0),
                places_lost: Some(0),
                counters: vec![
                    counter(Some("cycles"), Some("clock")),
                    counter(Some("cache-misses"), Some("none")),
                ],
            }],
        }
    }

    fn drawn(screen: &Screen, ui: &mut Ui, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| screen.draw(frame, ui)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| line(y).trim_end().to_owned()).collect()
    }

    #[test]
    fn text_shows_all_three_views() {
        let text = screen().text();
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].contains("VM 'box', running, 2 vCPUs") && lines[0].contains("1,500 samples of cycles")
        );
        let at = |word: &str| lines.iter().position(|l| l.contains(word)).expect(word);
        assert!(
            at("hot") < at("do_work") && at("do_work") < at("cool"),
            "sorted by share"
        );
        assert!(lines[at("hot")].contains("60.00%") && lines[at("hot")].contains("[.] hot"));
        assert!(lines[at("do_work")].contains("[k] do_work"));
        assert!(text.contains("50.0%") && text.contains("1.0%") && text.contains("2,100,000,000 (50%)"));
        assert!(text.contains("<not counted>") && text.contains("<not supported>"));
        let counter = lines[at("clock")];
        assert!(
            counter.contains("1,234,567") && counter.contains("50.0%"),
            "{counter}"
        );
        assert!(
            !lines[at("cache-misses")].contains("1,234,567"),
            "nobody counted it"
        );
    }

    #[test]
    fn keys_change_what_is_drawn() {
        let (screen, mut ui) = (screen(), Ui::default());
        let lines = drawn(&screen, &mut ui, 100, 10);
        assert!(lines[0].starts_with("perfvisor top: VM 'box'") && lines[9].starts_with("q quit"));
        assert!(
            lines[3].contains("hot") && lines[4].contains("do_work"),
            "{lines:#?}"
        );
        ui.next_sort();
        assert!(drawn(&screen, &mut ui, 100, 10)[3].contains("cool"), "by symbol");
        ui.reverse = true;
        assert!(drawn(&screen, &mut ui, 100, 10)[3].contains("hot"));
        ui.next_view();
        assert!(
            drawn(&screen, &mut ui, 100, 10)
                .join("\n")
                .contains("KVM exits/s")
        );
        ui.next_view();
        assert!(
            drawn(&screen, &mut ui, 130, 10)
                .join("\n")
                .contains("cache-misses")
        );
    }

    /// No size of a terminal is too small, and scrolling stops at the end.
    #[test]
    fn any_size_can_be_drawn() {
        let screen = screen();
        for (width, height) in [(1, 1), (10, 2), (3, 40), (200, 3), (80, 24)] {
            for view in 0..3 {
                let mut ui = Ui::default();
                ui.show(view);
                ui.scroll(1000);
                drawn(&screen, &mut ui, width, height);
                assert!(ui.offset <= 3);
                drawn(&Screen::waiting(&screen.vm, "cycles"), &mut ui, width, height);
            }
        }
    }
}
