/*
 * known N: a program whose instructions are all known, because nothing else is linked to it.
 *
 * From its first instruction to exit(2), with D digits in N: 2N + 7D + 8 instructions, N + 2D + 2 branches (the system
 * call is one).
 */
	.globl _start
	.text
_start:
	mov 16(%rsp), %rsi	/* argv[1] */
	xor %edi, %edi
1:	movzbl (%rsi), %eax
	sub $'0', %eax
	js 2f
	imul $10, %rdi, %rdi
	add %rax, %rdi
	inc %rsi
	jmp 1b
2:	sub $1, %rdi
	jne 2b
	mov $60, %eax
	xor %edi, %edi
	syscall

	.section .note.GNU-stack, "", @progbits
