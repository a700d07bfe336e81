//! Tests of the step meter on the physical processor, with a child process under ptrace instead of
//! a vCPU.
//!
//! The numbers in comments were counted by hand according to the rules in `vpmu::exact`.

#![expect(unsafe_code, reason = "ptrace and fork")]

use std::arch::global_asm;
use std::fs::File;
use std::os::unix::fs::FileExt;

use vpmu::Vendor;
use vpmu::exact::*;

global_asm!(
    ".pushsection .text.exact_blocks, \"ax\"",
    ".globl exact_start, exact_straight, exact_loop, exact_calls, exact_rep, exact_memory, exact_conditions",
    // 32 instructions: 1 + 10 * 3 + 1.
    "exact_straight: mov eax, 1",
    ".rept 10",
    "add rax, 3",
    "lea rdx, [rax + 5]",
    "xor ecx, ecx",
    ".endr",
    "ret",
    // 202 instructions: 1 + 100 * 2 + 1. 101 branches, of which 100 taken.
    "exact_loop: mov ecx, 100",
    "2: dec ecx",
    "jnz 2b",
    "ret",
    // 11 instructions. 8 branches: jnz not taken, jz, call, ret, call *, ret, jmp *, ret. 3 loads:
    // ret. 2 stores: call.
    "exact_calls: xor eax, eax",
    "jnz 3f",
    "jz 2f",
    "nop",
    "2: call 4f",
    "lea rdx, [rip + 4f]",
    "call rdx",
    "lea rdx, [rip + 3f]",
    "jmp rdx",
    "nop",
    "3: ret",
    "4: ret",
    // 10 instructions: rep movsb and rep stosb, which has zero iterations, count once each, and the
    // loop counts three times.
    "exact_rep: lea rsi, [rsp - 128]",
    "lea rdi, [rsp - 64]",
    "mov ecx, 17",
    "rep movsb",
    "rep stosb", // rcx is 0: neither loads nor stores
    "mov ecx, 3",
    "2: loop 2b", // 3 loop instructions, 2 of them taken
    "ret",
    // 7 loads: 3 mov, pop, add, xchg, ret. 5 stores: 2 mov, push, add, xchg.
    "exact_memory: lea rdx, [rsp - 128]",
    "mov rax, [rdx]",
    "mov rax, [rdx + 8]",
    "mov eax, [rdx + 16]",
    "mov [rdx + 24], rax",
    "mov [rdx + 32], eax",
    "push rax",
    "pop rax",
    "add [rdx + 40], eax",
    "xchg [rdx + 48], rax",
    "lea rcx, [rdx + rax]",
    "nop dword ptr [rax]",
    "prefetcht0 [rdx]",
    "ret",
    // Tests every condition after a comparison. Each jump targets the next instruction, so only the
    // counts show whether the jump was taken. cmp 1, 2 sets CF, SF and PF (0xff has eight ones),
    // and clears ZF and OF.
    "exact_conditions: mov eax, 1",
    "cmp eax, 2",
    "jo 2f", // not taken
    "2: jno 2f",
    "2: jb 2f",
    "2: jae 2f", // not taken
    "2: je 2f",  // not taken
    "2: jne 2f",
    "2: jbe 2f",
    "2: ja 2f", // not taken
    "2: js 2f",
    "2: jns 2f", // not taken
    "2: jp 2f",
    "2: jnp 2f", // not taken
    "2: jl 2f",
    "2: jge 2f", // not taken
    "2: jle 2f",
    "2: jg 2f", // not taken
    "2: jrcxz 2f",
    "2: ret",
    ".popsection",
);

unsafe extern "C" {
    fn exact_straight();
    fn exact_loop();
    fn exact_calls();
    fn exact_rep();
    fn exact_memory();
    fn exact_conditions();
}

/// Child process that is stopped under ptrace.
struct Child {
    pid: i32,
    memory: File,
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the process is our child and has not been waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

impl Child {
    fn start(body: impl FnOnce()) -> Self {
        // SAFETY: the child only calls ptrace, raise, the given body and _exit, none of which
        // depends on other threads.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork failed");
        if pid == 0 {
            // SAFETY: as for the fork above, the child only calls functions that do not depend on
            // other threads.
            unsafe {
                libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
                libc::raise(libc::SIGSTOP);
            }
            body();
            // SAFETY: ends the child without running the exit handlers of the test harness.
            unsafe { libc::_exit(0) };
        }
        let child = Self {
            pid,
            memory: File::open(format!("/proc/{pid}/mem")).unwrap(),
        };
        assert!(child.wait(), "the child ended early");
        child
    }

    /// Waits until the child stops. Returns `false` if the child has exited.
    fn wait(&self) -> bool {
        let mut status = 0;
        // SAFETY: `status` is valid for writing.
        let waited = unsafe { libc::waitpid(self.pid, &mut status, 0) };
        assert_eq!(waited, self.pid);
        libc::WIFSTOPPED(status)
    }

    fn step(&self) -> bool {
        // SAFETY: the child is stopped, and no memory is passed.
        let result = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, 0) };
        assert_eq!(result, 0, "single-stepping failed");
        self.wait()
    }

    fn state(&self) -> SteppedCpuState {
        // SAFETY: all zeros is a valid value of this plain structure.
        let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        // SAFETY: `regs` has the type that PTRACE_GETREGS fills, and the child is stopped.
        let result = unsafe { libc::ptrace(libc::PTRACE_GETREGS, self.pid, 0, &mut regs) };
        assert_eq!(result, 0, "reading registers failed");
        SteppedCpuState {
            rip: regs.rip,
            rflags: regs.eflags,
            cpl: 3,
            size: CodeSegmentMode::Bits64,
            gpr: [
                regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
                regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
            ],
            segment_bases: [0, 0, 0, 0, regs.fs_base, regs.gs_base],
        }
    }

    /// Single-steps `function` from its first instruction to its return, and returns the retired
    /// counts.
    fn measure(&self, function: u64, vendor: Vendor) -> RetiredCounts {
        let mut memory = Memory(&self.memory);
        while self.state().rip != function {
            assert!(self.step(), "the child never came to the function");
        }
        let back = {
            let mut bytes = [0; 8];
            assert_eq!(memory.read(self.state().gpr[4], &mut bytes), 8);
            u64::from_le_bytes(bytes)
        };
        let mut meter = SingleStepMeter::new(vendor);
        let mut total = RetiredCounts::default();
        while self.state().rip != back {
            meter.begin(&self.state(), &mut memory);
            assert!(self.step(), "the child ended in the function");
            let step = meter.end(&self.state(), &mut memory);
            assert!(!step.event && !step.lost, "{:#x?}: {step:?}", self.state());
            assert_eq!(step.kernel, RetiredCounts::default());
            total.add(step.user);
        }
        total
    }
}

struct Memory<'a>(&'a File);

impl SteppedGuestMemory for Memory<'_> {
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        self.0.read_at(buffer, linear).unwrap_or(0)
    }

    fn gate(&mut self, _: u8) -> Option<u64> {
        None
    }
}

fn measure(function: unsafe extern "C" fn()) -> RetiredCounts {
    let child = Child::start(|| {
        // SAFETY: the code blocks follow the C calling convention and only write to the red zone of
        // their stack.
        unsafe { function() }
    });
    child.measure(function as usize as u64, Vendor::Intel)
}

#[test]
fn known_code_retires_its_counts() {
    // Expected numbers of instructions, branches, taken branches, conditional branches, loads and
    // stores.
    let blocks: [(&str, unsafe extern "C" fn(), [u32; 6]); 5] = [
        ("straight code", exact_straight, [32, 1, 1, 0, 1, 0]),
        ("a loop", exact_loop, [202, 101, 100, 100, 1, 0]),
        (
            "direct and indirect calls and jumps",
            exact_calls,
            [11, 8, 7, 2, 3, 2],
        ),
        // Instructions: 3 + 1 + 1 + 1 + 3 + 1. The MOVS loads and stores, and the RET loads.
        ("string instructions count once", exact_rep, [10, 4, 3, 3, 2, 1]),
        (
            "loads and stores count instructions",
            exact_memory,
            [14, 1, 1, 0, 7, 5],
        ),
    ];
    for (name, block, counts) in blocks {
        let [
            instructions,
            branches,
            taken_branches,
            conditional_branches,
            loads,
            stores,
        ] = counts;
        let expected = RetiredCounts {
            instructions,
            branches,
            taken_branches,
            conditional_branches,
            loads,
            stores,
        };
        assert_eq!(measure(block), expected, "{name}");
    }
}

#[test]
fn taken_branch_is_detected_for_identical_targets() {
    let counts = measure(exact_conditions);
    assert_eq!((counts.instructions, counts.branches), (20, 18));
    assert_eq!(counts.conditional_branches, 17, "all but the RET, taken or not");
    // The branches jno, jb, jne, jbe, js, jp, jl, jle and the RET are taken. Whether JRCXZ is taken
    // depends on the child's RCX.
    assert!([9, 10].contains(&counts.taken_branches), "{counts:?}");
}

#[test]
fn exact_counts_are_reproducible() {
    let first = measure(exact_calls);
    for _ in 0..20 {
        assert_eq!(measure(exact_calls), first);
    }
}

/// The step meter explains every step of a real program, from its start to its exit.
#[test]
fn every_step_of_a_program_is_explained() {
    let child = Child::start(|| {
        let program = c"/bin/true".as_ptr();
        let arguments = [program, std::ptr::null()];
        // SAFETY: both lists end with a null pointer and are valid during the call.
        unsafe { libc::execv(program, arguments.as_ptr()) };
    });
    let mut meter = SingleStepMeter::new(Vendor::Intel);
    let mut retired = 0;
    let mut steps = 0;
    while steps < 60_000 {
        let before = child.state();
        // EXECVE replaces the address space, so the file must be reopened.
        let file = File::open(format!("/proc/{}/mem", child.pid)).unwrap();
        let mut memory = Memory(&file);
        let ahead = meter.begin(&before, &mut memory);
        if !child.step() {
            break;
        }
        let after = child.state();
        let step = meter.end(&after, &mut memory);
        steps += 1;
        assert!(
            !step.event && !step.lost,
            "{ahead:?} {before:#x?} {after:#x?} {step:?}"
        );
        retired += step.user.instructions;
    }
    assert!(
        retired > 10_000,
        "only {retired} of {steps} steps retired something"
    );
}
