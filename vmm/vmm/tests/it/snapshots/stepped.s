# Guest of the test with random cuts and the exact backing, in 64-bit mode. Counter 0 counts
# instructions, and each round writes it to the serial port, read by RDMSR and by RDPMC. Counter 1
# counts them too, with an interrupt after PERIOD of them; the handler adds up the addresses that it
# interrupts. A round has straight-line code, repeated string instructions with and without exits,
# and writes that stop and start counter 0.
#
# as --64 stepped.s -o stepped.o
# ld -m elf_x86_64 -Ttext=0x100020 -o stepped.elf stepped.o
# objcopy -O binary -j .text stepped.elf stepped.bin
.intel_syntax noprefix
.set ROUNDS, 40
.set PERIOD, 97
.set VECTOR, 0x40
.set IDT, 0x180000
.set PML4, 0x181000
.set PDPT, 0x182000
.set DIRECTORIES, 0x183000
.set PMIS, 0x1a0000
.set ADDRESSES, 0x1a0004
.set LVTPC, 0xfee00340
.text
.globl _start
.code32
_start:
    cli
    cld
    mov esp, 0x1f0000
    # The first 4 GiB in pages of 2 MiB.
    mov edi, DIRECTORIES
    mov eax, 0x83
    mov ecx, 2048
1:  mov [edi], eax
    add edi, 8
    add eax, 0x200000
    loop 1b
    mov edi, PDPT
    mov eax, DIRECTORIES + 3
    mov ecx, 4
2:  mov [edi], eax
    add edi, 8
    add eax, 4096
    loop 2b
    mov dword ptr ds:[PML4], PDPT + 3
    mov eax, PML4
    mov cr3, eax
    mov eax, 0x20
    mov cr4, eax
    mov ecx, 0xc0000080
    rdmsr
    or eax, 0x100
    wrmsr
    mov eax, 0x80010031
    mov cr0, eax
    lgdt [gdt_pointer]
    ljmp 8, offset long_mode
.code64
long_mode:
    mov eax, 16
    mov ss, eax
    mov ds, eax
    mov es, eax
    mov eax, offset handler
    mov edx, eax
    and eax, 0xffff
    or eax, 8 << 16
    mov dword ptr ds:[IDT + VECTOR*16], eax
    and edx, 0xffff0000
    or edx, 0x8e00
    mov dword ptr ds:[IDT + VECTOR*16 + 4], edx
    lidt [idtr]
    mov ebx, 0xfee00000
    mov dword ptr [rbx + 0xf0], 0x1ff
    mov dword ptr [rbx + 0x340], VECTOR
    # The timer would interrupt, too.
    mov al, 0xff
    out 0x21, al
    out 0xa1, al
    sti
    xor edx, edx
    mov ecx, 0xc2
    mov eax, -PERIOD
    wrmsr
    mov ecx, 0x186
    mov eax, 0x4300c0
    wrmsr
    mov ecx, 0x187
    mov eax, 0x5300c0
    wrmsr
    xor r12d, r12d
    mov r13d, 1
next:
    mov ecx, 0xc1
    rdmsr
    call put
    xor ecx, ecx
    rdpmc
    call put
    # Counter 0 stops and starts.
    mov ecx, 0x186
    xor eax, eax
    xor edx, edx
    wrmsr
    nop
    nop
    mov eax, 0x4300c0
    wrmsr
    # Straight-line code.
    mov ecx, 6
3:  imul r13d, r13d, 1103515245
    add r13d, 12345
    mov eax, r13d
    shr eax, 16
    xor eax, r12d
    lea esi, [rax + rax*2]
    add esi, r13d
    rol esi, 5
    add dword ptr ds:[0x190000], esi
    dec ecx
    jnz 3b
    mov edi, 0x1b0000
    mov ecx, 64
    rep stosb
    mov esi, 0x100020
    mov ecx, 5
    mov dx, 0x3f8
    rep outsb
    mov esi, 0x100020
    mov edi, 0x100020
    mov ecx, 9
    repe cmpsb
    inc r12d
    cmp r12d, ROUNDS
    jb next
    # The results.
    xor eax, eax
    xor edx, edx
    mov ecx, 0x187
    wrmsr
    mov ecx, 0x186
    wrmsr
    mov ecx, 0xc1
    rdmsr
    call put
    mov ecx, 0xc2
    rdmsr
    call put
    mov eax, ds:[PMIS]
    call put
    mov eax, ds:[ADDRESSES]
    call put
    mov eax, ds:[0x190000]
    call put
    mov al, 0x10
    out 0xf4, al
4:  hlt
    jmp 4b
put:
    mov ecx, 4
    mov dx, 0x3f8
5:  out dx, al
    shr eax, 8
    loop 5b
    ret
handler:
    push rax
    push rcx
    push rdx
    inc dword ptr ds:[PMIS]
    mov eax, [rsp + 24]
    add ds:[ADDRESSES], eax
    mov ecx, 0x390
    mov eax, 2
    xor edx, edx
    wrmsr
    mov ecx, 0xc2
    mov eax, -PERIOD
    wrmsr
    mov dword ptr [rbx + 0x340], VECTOR
    mov dword ptr [rbx + 0xb0], 0
    pop rdx
    pop rcx
    pop rax
    iretq
.balign 8
gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff
gdt_pointer:
    .word 23
    .quad gdt
.balign 8
idtr:
    .word VECTOR*16 + 15
    .quad IDT
