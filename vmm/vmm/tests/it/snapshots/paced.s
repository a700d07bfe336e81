# Guest of the test with random cuts. Its output does not depend on time, although its PMIs are due,
# masked, delayed by --pmi-limit, and found by RDPMC: each round waits for its PMI.
#
# The first rounds let counter 2 overflow in cycles and read it by RDPMC until it has wrapped; the PMI
# precedes that read. In the other rounds counter 1 overflows after 7 port exits, in odd rounds while
# LVTPC is masked. There are few rounds of the first kind, so that the limit does not delay their PMIs.
#
# as --32 paced.s -o paced.o
# ld -m elf_i386 -Ttext=0x100020 -o paced.elf paced.o
# objcopy -O binary -j .text paced.elf paced.bin
.intel_syntax noprefix
.code32
.set READS, 12
.set ROUNDS, 30
.set PERIOD, 7
.set CYCLES, 200000
.set VECTOR, 0x40
.set PMIS, 0x1a0000
.set PRECEDED, 0x1a0004
# 1: waits for a PMI that only the limit can delay; 0: otherwise.
.set WAITS, 0x1a0008
.set LVTPC, 0xfee00340
.text
.globl _start
_start:
    cli
    mov esp, 0x1f0000
    # Gate of the vector: selector 0x10.
    mov eax, offset handler
    mov edx, eax
    and eax, 0xffff
    or eax, 0x00100000
    mov [0x180000 + VECTOR*8], eax
    and edx, 0xffff0000
    or edx, 0x8e00
    mov [0x180004 + VECTOR*8], edx
    lidt [idtr]
    mov dword ptr ds:[0xfee000f0], 0x1ff
    mov dword ptr ds:[LVTPC], VECTOR
    # The timer would interrupt, too.
    mov al, 0xff
    out 0x21, al
    out 0xa1, al
    sti
    # Counter 2 counts cycles.
    xor edx, edx
    mov ecx, 0x188
    mov eax, 0x53003c
    wrmsr
    xor esi, esi
read:
    inc esi
    mov ecx, 0xc3
    mov eax, -CYCLES
    xor edx, edx
    wrmsr
    mov ecx, 2
1:  rdpmc
    test edx, 0x8000
    jnz 1b
    cmp esi, ds:[PMIS]
    sete al
    movzx eax, al
    add ds:[PRECEDED], eax
    mov dx, 0x3f8
    out dx, al
    cmp esi, READS
    jb read
    # Counters 0 and 1 count port exits, instead of counter 2.
    xor edx, edx
    mov ecx, 0x188
    xor eax, eax
    wrmsr
    mov ecx, 0xc2
    mov eax, -4
    wrmsr
    mov ecx, 0x186
    mov eax, 0x4302ff
    wrmsr
    mov ecx, 0x187
    mov eax, 0x5302ff
    wrmsr
    xor esi, esi
    mov ebx, 1
next:
    mov edi, ds:[PMIS]
    test esi, 1
    jz 1f
    mov dword ptr ds:[LVTPC], 0x10000 + VECTOR
1:  mov ebp, 4
    call write
    test esi, 1
    jz 2f
    mov ebp, 4
    call write
    mov dword ptr ds:[LVTPC], VECTOR
    jmp 3f
2:  mov dword ptr ds:[WAITS], 1
3:  pause
    cmp edi, ds:[PMIS]
    je 3b
    mov dword ptr ds:[WAITS], 0
    # Three port exits: the low bytes of both counters, and of the number of PMIs.
    mov ecx, 0xc1
    rdmsr
    mov dx, 0x3f8
    out dx, al
    mov ecx, 0xc2
    rdmsr
    mov dx, 0x3f8
    out dx, al
    mov al, ds:[PMIS]
    out dx, al
    inc esi
    cmp esi, ROUNDS
    jb next
    # The results.
    xor eax, eax
    xor edx, edx
    mov ecx, 0x186
    wrmsr
    mov ecx, 0x187
    wrmsr
    mov ecx, 0xc1
    rdmsr
    call put
    mov ecx, 0xc2
    rdmsr
    call put
    mov eax, ds:[PMIS]
    call put
    mov ecx, 0x38e
    rdmsr
    call put
    mov eax, ds:[PRECEDED]
    call put
    mov al, 0x10
    out 0xf4, al
4:  hlt
    jmp 4b
# Writes EBP bytes.
write:
    imul ebx, ebx, 1103515245
    add ebx, 12345
    mov eax, ebx
    shr eax, 16
    mov dx, 0x3f8
    out dx, al
    dec ebp
    jnz write
    ret
put:
    mov ecx, 4
    mov dx, 0x3f8
5:  out dx, al
    shr eax, 8
    loop 5b
    ret
handler:
    pusha
    inc dword ptr ds:[PMIS]
    mov ecx, 0x38e
    rdmsr
    mov ecx, 0x390
    xor edx, edx
    wrmsr
    test al, 2
    jz 6f
    mov ecx, 0xc2
    mov eax, -PERIOD
    wrmsr
6:  mov dword ptr ds:[LVTPC], VECTOR
    mov dword ptr ds:[0xfee000b0], 0
    popa
    # Software-only KVM does not emulate IRET here.
    push dword ptr [esp+8]
    popfd
    ret 8
.balign 4
idtr:
    .word VECTOR*8 + 7
    .long 0x180000
